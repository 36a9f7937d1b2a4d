"""The pauses of one session, as a framework's callbacks tell them. ``Gaps`` owns those that are open."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.client import Client
from tenuto.headers import write_identity
from tenuto.pause import Pause
from tenuto.session import current_session
from tenuto.session_core import SessionCore


class Gaps:
    """Callbacks may come from several threads, twice, or not at all; none of that reaches the framework."""

    def __init__(self, session: SessionCore | None, agent: str) -> None:
        self.session = session or current_session() or _shared_client().session(agent=agent)
        self._open: dict[str, Pause] = {}
        self._lock = threading.Lock()

    @property
    def headers(self) -> dict[str, str]:
        """What a request of this session has to carry."""
        return write_identity(self.session.id, self.session.parent)

    def turn_begins(self) -> None:
        """A model call is about to be sent: whatever pause is open is over."""
        with self._lock:
            left, self._open = list(self._open.values()), {}
        for pause in left:
            _safely(pause.stop)

    def tool_begins(self, call: str, name: str, args: Mapping[str, Any] | None = None) -> None:
        """The tool call with the id ``call`` runs."""
        self._begin(call, "tool", name, args)

    def tool_ends(self, call: str) -> None:
        """It has ended, one way or another."""
        with self._lock:
            pause = self._open.pop(call, None)
        if pause is not None:
            _safely(pause.stop)

    def turn_over(self, kind: str = "human") -> None:
        """The agent has given its answer; the next turn comes from a person, or from whatever ``kind`` says."""
        self.turn_begins()
        if not self.session.closed:
            self._begin("turn", kind, None, None)

    def _begin(self, key: str, kind: str, name: str | None, args: Mapping[str, Any] | None) -> None:
        def begin() -> None:
            pause = self.session.pause(kind, name=name, args=args if isinstance(args, Mapping) else None).start()
            with self._lock:
                before = self._open.pop(key, None)
                self._open[key] = pause
            if before is not None:
                before.stop(learn=False)

        _safely(begin)


def _safely(call: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):  # a hint is advice: its failure is no reason to stop an agent
        call()


@functools.cache
def _shared_client() -> Client:
    """The client of sessions that nobody else made; it delivers what waits when the process ends."""
    client = Client()
    atexit.register(client.close)
    return client
