"""The OpenAI Agents SDK: run hooks that announce every tool and every end of a run. State: ``Gaps``.

await Runner.run(agent, "fix the failing test", **run_options(session))
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from tenuto.adapters.gaps import Gaps
from tenuto.session_core import SessionCore


def run_options(session: SessionCore | None = None) -> dict[str, Any]:
    """Keyword arguments for ``Runner.run``, ``run_sync`` and ``run_streamed``: hooks, and headers that name the session.

    An agent's own model settings stay; where you pass a ``run_config`` of your own, use ``run_hooks`` and add its
    ``headers`` to that.
    """
    agents = importlib.import_module("agents")
    hooks = run_hooks(session)
    settings = agents.ModelSettings(extra_headers=hooks.headers)
    return {"hooks": hooks, "run_config": agents.RunConfig(model_settings=settings)}


def run_hooks(session: SessionCore | None = None) -> Any:
    """An ``agents.RunHooks`` for one conversation; ``headers``: what its requests have to carry."""
    base: Any = importlib.import_module("agents").RunHooks
    gaps = Gaps(session, "openai-agents")

    class TenutoRunHooks(base):
        headers = gaps.headers

        async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:
            gaps.turn_begins()

        async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
            gaps.tool_begins(_call(context, tool), str(getattr(tool, "name", "tool")), _arguments(context))

        async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: object) -> None:
            gaps.tool_ends(_call(context, tool))

        async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
            gaps.turn_over()

    return TenutoRunHooks()


def _call(context: Any, tool: Any) -> str:
    return str(getattr(context, "tool_call_id", None) or getattr(tool, "name", "tool"))


def _arguments(context: Any) -> dict[str, Any] | None:
    try:
        value = json.loads(getattr(context, "tool_arguments", None) or "{}")
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) else None
