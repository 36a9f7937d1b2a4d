"""The replay: the recorded prompts and pauses again, against another server. No state of its own.

Prompts are the recorded ones, answers included, so that every arm serves the same tokens; what an arm itself answers is
compared with the recording and then dropped. The agents are the same too: each waits for its own answer before its pause
begins, so a slow server delays them as it would in life.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import anyio

import tenuto
from tenuto_server.bench.demo_recording import CompactionStep, PauseStep, RecordedSession, Recording, TurnStep
from tenuto_server.bench.demo_turns import TurnLog


class ReplayPass:
    """Plays a recording through a client."""

    def __init__(self, client: tenuto.AsyncClient, recording: Recording, log: TurnLog) -> None:
        self._client = client
        self._recording = recording
        self._log = log

    async def run(self) -> None:
        """All sessions, to their ends."""
        async with anyio.create_task_group() as tasks:
            for sessions in self._recording.agents.values():
                tasks.start_soon(self._agent, sessions)

    async def _agent(self, sessions: Sequence[RecordedSession]) -> None:
        """An agent's sessions one after the other, each as long after the one before it as in the recording."""
        ended_s = 0.0
        for recorded in sessions:
            await anyio.sleep(max(0.0, recorded.start_s - ended_s))
            async with self._client.session(recorded.id, agent=recorded.agent) as session:
                await self._play(session, recorded, "start")
            ended_s = recorded.end_s

    async def _play(self, session: tenuto.AsyncSession, recorded: RecordedSession, after: str) -> None:
        messages: list[dict[str, Any]] = []
        pause_s: float | None = None
        compaction: tenuto.Compaction | None = None
        for position, step in enumerate(recorded.steps):
            match step:
                case TurnStep():
                    messages = [*messages[: step.keep], *step.append]
                    asked = "summary" if compaction is not None else after
                    waited_s = None if compaction is not None else pause_s
                    await self._log.turn(
                        session, messages, step.request, after=asked, pause_s=waited_s, expected=step.answer
                    )
                    messages = [*messages, {"role": "assistant", "content": step.answer}]
                case PauseStep():
                    after, pause_s = step.kind, await self._pause(session, step)
                case CompactionStep("begin"):
                    compaction = session.compaction(keep_messages=1).__enter__()
                case CompactionStep("commit") if compaction is not None:
                    compaction.commit(recorded.compacted(position, messages))
                    after, pause_s, compaction = "post-compaction", None, None
                case _:
                    pass

    async def _pause(self, session: tenuto.AsyncSession, step: PauseStep) -> float:
        """The pause, with what the harness knows of it; its length in seconds."""
        began = time.monotonic()
        if step.children:
            children = [self._recording.sessions[name] for name in step.children]
            forks = session.fan_out([child.agent or child.id for child in children])
            async with session.pause(step.kind), anyio.create_task_group() as tasks:
                for fork, child in zip(forks, children, strict=True):
                    tasks.start_soon(self._subagent, fork, child)
        else:
            async with session.pause(step.kind, name=step.tool, args=step.arguments):
                await anyio.sleep(step.duration_s)
        return time.monotonic() - began

    async def _subagent(self, session: tenuto.AsyncSession, recorded: RecordedSession) -> None:
        async with session:
            await self._play(session, recorded, "subagent")
