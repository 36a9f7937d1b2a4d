"""pydantic-ai: a capability that announces every tool and every end of a run. State: ``Gaps``.

agent = Agent(model, capabilities=[capability(session)])
"""

from __future__ import annotations

import importlib
from typing import Any

from tenuto.adapters.gaps import Gaps
from tenuto.session_core import SessionCore


def capability(session: SessionCore | None = None) -> Any:
    """A ``pydantic_ai.capabilities.AbstractCapability`` for one conversation."""
    base: Any = importlib.import_module("pydantic_ai.capabilities").AbstractCapability
    gaps = Gaps(session, "pydantic-ai")

    class TenutoCapability(base):
        def get_model_settings(self) -> Any:
            return {"extra_headers": gaps.headers}

        async def before_model_request(self, ctx: Any, request_context: Any) -> Any:
            gaps.turn_begins()
            return request_context

        async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
            gaps.tool_begins(call.tool_call_id, call.tool_name, args if isinstance(args, dict) else None)
            try:
                return await handler(args)
            finally:
                gaps.tool_ends(call.tool_call_id)

        async def after_run(self, ctx: Any, *, result: Any) -> Any:
            gaps.turn_over()
            return result

    return TenutoCapability()
