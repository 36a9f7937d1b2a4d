"""The recording pass: agents that follow their plans, with real turns, real tools and real pauses. No state of its own.

The trace that ``tenuto.Recorder`` writes on the way is all that the replay needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio

import tenuto
from tenuto_server.bench.demo_tools import TOOLS, WorkFolder
from tenuto_server.bench.demo_turns import TurnLog
from tenuto_server.bench.workload import (
    AgentPlan,
    CompactStep,
    ForkStep,
    PersonStep,
    Step,
    ToolStep,
    WorkloadSettings,
)

SYSTEM = (
    "You are a coding agent in a small Python repository. Work in small steps: look before you change anything, change as "
    "little as you can, and run the tests after every change. Use one tool at a time and read its whole output before "
    "you go on. Never touch files outside the repository. When the task is done, say in two sentences what you did, and "
    "name anything that is left open. If a question needs a person's decision, ask it and stop."
)

Messages = list[dict[str, Any]]


class RecordingPass:
    """Runs plans against a server. ``answer_tokens``: length of every answer."""

    def __init__(self, client: tenuto.AsyncClient, folder: WorkFolder, log: TurnLog, answer_tokens: int) -> None:
        self._client = client
        self._folder = folder
        self._log = log
        self._request: dict[str, Any] = {"max_tokens": answer_tokens, "tools": TOOLS}

    async def run(self, plans: Sequence[AgentPlan], settings: WorkloadSettings) -> None:
        """All agents, to their ends."""
        async with anyio.create_task_group() as tasks:
            for plan in plans:
                tasks.start_soon(self._agent, plan, settings)

    async def _agent(self, plan: AgentPlan, settings: WorkloadSettings) -> None:
        await anyio.sleep(plan.start_s)
        for number, task in enumerate(plan.sessions):
            if number:
                await anyio.sleep(settings.between_s)
            path, first = task.brief
            excerpt = self._folder.excerpt(path, first, settings.brief_chars)
            messages: Messages = [
                tenuto.system(SYSTEM),
                tenuto.user(f"{task.task}\n\nFrom {path}, line {first}:\n{excerpt}"),
            ]
            async with self._client.session(task.id, agent=plan.name) as session:
                await self._work(session, messages, task.steps, "start")

    async def _work(
        self, session: tenuto.AsyncSession, messages: Messages, steps: Sequence[Step], after: str
    ) -> tenuto.Turn:
        """A turn, then for every step what follows and the next turn. Returns the last turn."""
        pause_s: float | None = None
        for step in (*steps, None):
            turn = await self._log.turn(session, messages, self._request, after=after, pause_s=pause_s)
            match step:
                case ToolStep():
                    message, call = called(turn, step.tool, step.arguments)
                    async with session.pause("tool", call) as pause:
                        output = await self._folder.run(step)
                        pause.record_output(output)
                    messages += [message, tenuto.tool_result(call, output)]
                    after, pause_s = "tool", pause.duration_s
                case PersonStep():
                    async with session.pause("human") as pause:
                        await anyio.sleep(step.wait_s)
                    messages += [turn.message, tenuto.user(step.text)]
                    after, pause_s = "human", pause.duration_s
                case ForkStep():
                    asked = " ".join(question for question, _ in step.questions)
                    message, call = called(turn, "task", {"questions": asked})
                    began = time.monotonic()
                    reports = await self._fork(session, step)
                    messages += [message, tenuto.tool_result(call, reports)]
                    after, pause_s = "subagent", time.monotonic() - began
                case CompactStep():
                    messages = await self._compact(session, [*messages, turn.message], step)
                    after, pause_s = "post-compaction", None
        return turn

    async def _fork(self, session: tenuto.AsyncSession, step: ForkStep) -> str:
        children = session.fan_out([f"explore-{n + 1}" for n in range(len(step.questions))])
        reports: dict[str, str] = {}

        async def explore(child: tenuto.AsyncSession, question: str, tool: ToolStep) -> None:
            async with child:
                messages = [dict(message) for message in child.history] + [tenuto.user(question)]
                turn = await self._work(child, messages, [tool], "subagent")
                reports[question] = turn.text

        async with session.pause("subagent"), anyio.create_task_group() as tasks:
            for child, (question, tool) in zip(children, step.questions, strict=True):
                tasks.start_soon(explore, child, question, tool)
        return "\n".join(f"{question} {reports[question]}" for question, _ in step.questions)

    async def _compact(self, session: tenuto.AsyncSession, history: Messages, step: CompactStep) -> Messages:
        async with session.compaction(keep_messages=1) as compaction:
            ask = [*history, tenuto.user(step.ask)]
            summary = await self._log.turn(session, ask, self._request, after="summary")
            messages = [history[0], tenuto.user(f"Summary of the work so far: {summary.text}\nGo on with the task.")]
            compaction.commit(messages)
        return messages


def called(turn: tenuto.Turn, name: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], tenuto.ToolCall]:
    """The assistant's message with the planned tool call added to what the model wrote, and that call."""
    raw = json.dumps(arguments)
    call = tenuto.ToolCall(f"call-{name}", name, dict(arguments), raw)
    spoken = {"id": call.id, "type": "function", "function": {"name": name, "arguments": raw}}
    return {**turn.message, "tool_calls": [spoken]}, call
