"""Writes traces of live sessions. ``Recorder`` owns the open file and each session's last prompt.

A record is advice to the future, never a burden to the present: a write that fails stops the recording and is counted,
it does not raise into the agent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tenuto.trace import (
    TraceCompaction,
    TraceEnd,
    TraceEvent,
    TraceHeader,
    TraceModelSwitch,
    TracePause,
    TraceSession,
    TraceTurn,
    dump_event,
    dump_header,
)
from tenuto.turn import Turn

_REQUEST_FIELDS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "tool_choice")


class Recorder:
    """Records every session of the clients that it is given to.

    ``content=False`` (default) stores counts and times only; ``content=True`` also the messages, answers and tool
    outputs, which a replay against a live server needs: such a file is as confidential as the sessions. ``clock`` must
    be the clients' clock. Raises ``OSError`` when the file cannot be created.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        content: bool = False,
        model: str | None = None,
        notes: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.content = content
        self.lost = 0
        self._clock = clock
        self._start_s = clock()
        self._lock = threading.Lock()
        self._history: dict[str, list[Mapping[str, Any]]] = {}
        self._tokens: dict[str, int] = {}
        self._file: IO[str] | None = self.path.open("w", encoding="utf-8")
        header = TraceHeader(started_unix_s=round(time.time(), 3), model=model, notes=notes)
        self._file.write(dump_header(header) + "\n")

    def write(self, event: TraceEvent) -> None:
        """Appends one event; on a full disk or closed file it counts the loss in ``lost``."""
        line = dump_event(event) + "\n"
        with self._lock:
            try:
                if self._file is None:
                    raise OSError("recording has ended")
                self._file.write(line)
                self._file.flush()
            except (OSError, ValueError):
                self.lost += 1

    def session(self, session: str, **fields: Any) -> None:
        """A session opened; ``fields`` as in ``TraceSession``."""
        self.write(TraceSession(self._at(), session, **fields))

    def turn(
        self, session: str, turn: Turn, messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any], started_s: float
    ) -> None:
        """A turn ended. The prompt is stored as the difference to the session's previous prompt and answer."""
        before = self._history.get(session, [])
        kept = next((i for i, (a, b) in enumerate(zip(before, messages, strict=False)) if a != b), None)
        kept = min(len(before), len(messages)) if kept is None else kept
        usage = turn.usage
        known = self._tokens.get(session)
        # Exact only while the prompt grows: then all of the last prompt and answer is still there.
        kept_tokens = min(known, usage.prompt_tokens) if known is not None and kept == len(before) else None
        event = TraceTurn(
            t_s=self._at(started_s),
            session=session,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            duration_s=round(turn.duration_s, 6),
            kept_tokens=0 if known is None else kept_tokens,
            ttft_s=None if turn.ttft_s is None else round(turn.ttft_s, 6),
            stop=turn.finish_reason,
            model=turn.model,
            tools=tuple(call.name for call in turn.tool_calls),
            cached={tier: n for tier, n in usage.by_tier.items() if n and tier != "recompute"},
            misses={miss.label: miss.tokens for miss in usage.misses},
            keep_messages=kept,
            append=[dict(m) for m in messages[kept:]] if self.content else None,
            answer=turn.message if self.content else None,
            request=self._request(body) if self.content else None,
        )
        self._history[session] = [*messages, turn.message]
        self._tokens[session] = usage.prompt_tokens + usage.completion_tokens
        self.write(event)

    def pause(self, session: str, started_s: float, *, output: str | None = None, **fields: Any) -> None:
        """A pause ended; ``fields`` as in ``TracePause``."""
        self.write(TracePause(self._at(started_s), session, output=output if self.content else None, **fields))

    def compaction(self, session: str, phase: str, **fields: Any) -> None:
        """A compaction phase; ``fields`` as in ``TraceCompaction``."""
        self.write(TraceCompaction(self._at(), session, phase, **fields))

    def model_switch(self, session: str, model: str, back_in_s: float | None) -> None:
        """The session's next turns use another model."""
        self.write(TraceModelSwitch(self._at(), session, model, back_in_s))

    def end(self, session: str, keep_s: float | None, joined: bool) -> None:
        """The session ended."""
        self._history.pop(session, None)
        self._tokens.pop(session, None)
        self.write(TraceEnd(self._at(), session, keep_s, joined))

    def close(self) -> None:
        """Ends the recording; later events count as lost."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, moment_s: float | None = None) -> float:
        return round((self._clock() if moment_s is None else moment_s) - self._start_s, 6)

    def _request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {k: body[k] for k in (*_REQUEST_FIELDS, "tools") if body.get(k) is not None}
