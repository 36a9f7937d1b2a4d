"""LangChain: agent middleware that announces every tool and every end of a run. State: ``Gaps``.

agent = create_agent(model, tools, middleware=[middleware(session)])
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tenuto.adapters.gaps import Gaps
from tenuto.session_core import SessionCore


def middleware(session: SessionCore | None = None) -> Any:
    """A ``langchain.agents.middleware.AgentMiddleware`` for one conversation, sync and async."""
    base: Any = importlib.import_module("langchain.agents.middleware").AgentMiddleware
    gaps = Gaps(session, "langchain")

    def named(request: Any) -> Any:
        settings = dict(request.model_settings or {})
        settings["extra_headers"] = {**(settings.get("extra_headers") or {}), **gaps.headers}
        return request.override(model_settings=settings)

    class TenutoMiddleware(base):
        def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            gaps.turn_begins()
            return handler(named(request))

        async def awrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            gaps.turn_begins()
            return await handler(named(request))

        def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            call = request.tool_call
            gaps.tool_begins(str(call.get("id")), call.get("name") or "tool", call.get("args"))
            try:
                return handler(request)
            finally:
                gaps.tool_ends(str(call.get("id")))

        async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
            call = request.tool_call
            gaps.tool_begins(str(call.get("id")), call.get("name") or "tool", call.get("args"))
            try:
                return await handler(request)
            finally:
                gaps.tool_ends(str(call.get("id")))

        def after_agent(self, state: Any, runtime: Any) -> None:
            gaps.turn_over()

        async def aafter_agent(self, state: Any, runtime: Any) -> None:
            gaps.turn_over()

    return TenutoMiddleware()
