"""One client connection of the proxy: requests in, answers out, over h11. ``Front`` owns the socket's protocol state.

Events that belong together are written together: every write is a system call, and a round of the event loop for the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import h11

READ_BYTES = 256 * 1024
HEAD_BYTES_MAX = 128 * 1024
IDLE_S = 600.0
BODY_STALL_S = 60.0
# What may wait here unread: a body under way, or what a client sends ahead while its answer is not out.
WAITING_BYTES_MAX = 1 << 20


class _Reader(asyncio.StreamReader):
    """A stream reader that says at once when the client has closed its side, whoever is reading or not."""

    on_gone: Callable[[], object] | None = None

    def feed_eof(self) -> None:
        super().feed_eof()
        self._tell()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self._tell()

    def _tell(self) -> None:
        if self.on_gone is not None:
            tell, self.on_gone = self.on_gone, None
            tell()


async def listen(host: str, port: int, serve: Callable[[Front], Coroutine[Any, Any, None]]) -> asyncio.Server:
    """Accepts connections; ``serve`` runs for each. Raises ``OSError``."""
    loop = asyncio.get_running_loop()

    def connection() -> asyncio.StreamReaderProtocol:
        reader = _Reader(limit=WAITING_BYTES_MAX, loop=loop)
        return asyncio.StreamReaderProtocol(reader, lambda _, writer: serve(Front(reader, writer)), loop=loop)

    return await loop.create_server(connection, host, port)


class Front:
    """Reads one request after the other and writes their answers."""

    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self.h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._reader = reader
        self._writer = writer

    async def request(self) -> h11.Request | None:
        """The next request's head; None when the client has gone or stays silent. Raises ``h11.RemoteProtocolError``."""
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            try:
                async with asyncio.timeout(IDLE_S):
                    data = await self._reader.read(READ_BYTES)
            except TimeoutError:
                return None
            self.h11.receive_data(data)

    async def body(self) -> bytes | None:
        """The next piece of the request's body, not to be changed; None at its end. Raises ``ConnectionError`` when the
        client leaves."""
        if self.h11.they_are_waiting_for_100_continue:
            await self._write(self.h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Data):
                return event.data  # a copy of its own already
            if isinstance(event, h11.EndOfMessage):
                return None
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client left in the middle of its request")
            async with asyncio.timeout(BODY_STALL_S):
                self.h11.receive_data(await self._reader.read(READ_BYTES))

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        """Calls ``tell`` once when the client closes its side, at once where it has; None calls nobody any more. What the
        client sends meanwhile waits for its next request."""
        self._reader.on_gone = tell
        if tell is not None and (self._reader.at_eof() or self._reader.exception() is not None):
            self._reader._tell()

    async def send(self, *events: h11.Event) -> None:
        """Writes events in one piece; waits only when the client does not keep up."""
        await self._write(b"".join([self.h11.send(event) or b"" for event in events]))

    async def answer(
        self, status: int, body: bytes, headers: Iterable[tuple[str, str]] = (), *, head_only: bool = False
    ) -> None:
        """A whole answer of the proxy's own, as JSON."""
        fields = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
        head = self.h11.send(h11.Response(status_code=status, headers=fields)) or b""
        data = b"" if head_only else self.h11.send(h11.Data(data=body)) or b""
        await self._write(head + data + (self.h11.send(h11.EndOfMessage()) or b""))

    @property
    def started(self) -> bool:
        """An answer has begun: what goes wrong now cannot be said any more."""
        return self.h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE)

    def next_cycle(self) -> bool:
        """Ready for another request on this connection; False when it has to be closed."""
        if self.h11.our_state is h11.DONE and self.h11.their_state is h11.DONE:
            self.h11.start_next_cycle()
            return True
        return False

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()

    async def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
            await self._writer.drain()
