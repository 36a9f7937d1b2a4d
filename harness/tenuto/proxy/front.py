"""One client connection of the proxy: requests in, answers out. ``Front`` owns the socket's protocol state.

Heads and chunked bodies are read by h11. A body whose length is known goes from the socket straight to where it stays: any
other way copies each of its bytes several times. Events that belong together are written together: every write is a system
call, and a round of the event loop for the peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import h11

READ_BYTES = 64 * 1024
HEAD_BYTES_MAX = 128 * 1024
IDLE_S = 600.0
BODY_STALL_S = 60.0
# What may wait here unread: a body under way, or what a client sends ahead while its answer is not out.
WAITING_BYTES_MAX = 1 << 20
# A larger body has its place in memory grow with what has come: a length is only a promise.
PROMISED_BYTES_MAX = 2 << 20

Serve = Callable[["Front"], Coroutine[Any, Any, None]]


async def listen(host: str, port: int, serve: Serve) -> asyncio.Server:
    """Accepts connections; ``serve`` runs for each. Raises ``OSError``."""
    return await asyncio.get_running_loop().create_server(lambda: Front(serve), host, port)


def _machine() -> h11.Connection:
    return h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)


class Front(asyncio.BufferedProtocol):
    """Reads one request after the other and writes their answers. ``buffer``: the body that is being read by ``fill``,
    ``filled`` bytes of it so far."""

    def __init__(self, serve: Serve) -> None:
        self.h11 = _machine()
        self.buffer = bytearray()
        self.filled = 0
        self._serve = serve
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport
        self._scratch = memoryview(bytearray(READ_BYTES))
        self._waiting = bytearray()  # has come and was not looked at
        self._left: int | None = None  # bytes of the body still to be taken; None where h11 reads it
        self._room: memoryview | None = None  # ``buffer`` while the socket's bytes go there
        self._wanted = 0
        self._ended = False
        self._lost: Exception | None = None
        self._news: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._on_gone: Callable[[], object] | None = None

    # -- what the event loop calls ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._task = asyncio.get_running_loop().create_task(self._serve(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._room is None else self._room[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._room is not None:
            self._filled_by(nbytes)
            if self.filled >= self._wanted:
                self._tell()
            return
        self._waiting += self._scratch[:nbytes]
        if len(self._waiting) > WAITING_BYTES_MAX:
            self._transport.pause_reading()
        self._tell()

    def eof_received(self) -> bool:
        self._end()
        return True  # the answer can still be written

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = exc or ConnectionResetError("the connection is closed")
        self._writable.set()
        self._end()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _end(self) -> None:
        self._ended = True
        self._tell()
        if self._on_gone is not None:
            tell, self._on_gone = self._on_gone, None
            tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def request(self) -> h11.Request | None:
        """The next request's head; None when the client has gone or stays silent. Raises ``h11.RemoteProtocolError``."""
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Request):
                self._frame(event)
                return event
            if event is not h11.NEED_DATA:
                return None
            try:
                data = await self._arrived(IDLE_S)
            except TimeoutError:
                return None
            self.h11.receive_data(data)

    def _frame(self, request: h11.Request) -> None:
        """Notes how the body's end is known; what came with the head is the body's, or the next request's."""
        told = {name: value for name, value in request.headers if name in (b"transfer-encoding", b"content-length")}
        self._left = None
        if b"transfer-encoding" not in told:
            self._left = int(told.get(b"content-length", b"0"))
            self._waiting[:0] = self.h11.trailing_data[0]

    @property
    def length(self) -> int | None:
        """Bytes of the body that are still to be taken; None where only its end will tell."""
        return self._left

    async def body(self) -> bytes | None:
        """The next piece of the request's body; None at its end. Raises ``ConnectionError`` when the client leaves,
        ``h11.RemoteProtocolError`` for what is no body."""
        await self._go_on()
        if self._left is None:
            return await self._chunk()
        if not self._left:
            return None
        data = await self._arrived(BODY_STALL_S)
        if not data:
            raise _cut_short(self._left)
        piece, rest = data[: self._left], data[self._left :]
        self._waiting[:0] = rest
        self._left -= len(piece)
        return piece

    async def _chunk(self) -> bytes | None:
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                return None
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client left in the middle of its request")
            self.h11.receive_data(await self._arrived(BODY_STALL_S))

    async def fill(self, size: int) -> None:
        """Reads on in a body of known length until at least ``size`` bytes of it are in ``buffer``. Raises as ``body``."""
        await self._go_on()
        while self.filled < size:
            if self.filled == len(self.buffer):
                self._grow()
                continue
            if self._ended:
                raise self._lost or _cut_short(self._left)
            had, self._wanted = self.filled, min(size, len(self.buffer))
            try:
                await self._wait(BODY_STALL_S)
            except TimeoutError:
                if self.filled == had:
                    raise

    def _grow(self) -> None:
        """Makes room for more of the body. Another buffer each time: the transport of the upstream may still read the old one."""
        assert self._left is not None
        grown = bytearray(min(self.filled + self._left, max(PROMISED_BYTES_MAX, 2 * self.filled)))
        grown[: self.filled] = self.buffer
        came = self._waiting[: len(grown) - self.filled]
        del self._waiting[: len(came)]
        grown[self.filled : self.filled + len(came)] = came
        self.buffer, self._room = grown, memoryview(grown)
        self._filled_by(len(came))
        self._transport.resume_reading()

    def _filled_by(self, count: int) -> None:
        assert self._left is not None
        self.filled += count
        self._left -= count
        if self.filled == len(self.buffer):
            self._room = None

    async def _go_on(self) -> None:
        if self.h11.they_are_waiting_for_100_continue:
            await self._write(self.h11.send(h11.InformationalResponse(status_code=100, headers=[])))

    async def _arrived(self, stall_s: float) -> bytes:
        """What has come and was not looked at, at least one byte; nothing at the end."""
        while not self._waiting and not self._ended:
            await self._wait(stall_s)
        if not self._waiting and self._lost is not None:
            raise self._lost
        data = bytes(self._waiting[:READ_BYTES])
        del self._waiting[:READ_BYTES]
        if len(self._waiting) <= WAITING_BYTES_MAX:
            self._transport.resume_reading()
        return data

    async def _wait(self, stall_s: float) -> None:
        self._news = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(stall_s):
                await self._news
        finally:
            self._news = None

    def when_gone(self, tell: Callable[[], object] | None) -> None:
        """Calls ``tell`` once when the client closes its side, at once where it has; None calls nobody any more. What the
        client sends meanwhile waits for its next request."""
        self._on_gone = tell
        if tell is not None and self._ended and (not self._waiting or self._lost is not None):
            self._end()

    # -- answers ----------------------------------------------------------------------------------------------------

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
        read = not self._left if self._left is not None else self.h11.their_state is h11.DONE
        if self.h11.our_state is not h11.DONE or not read:
            return False
        if self._left is None:
            self._waiting[:0] = self.h11.trailing_data[0]
        self.h11 = _machine()
        self.buffer, self.filled = bytearray(), 0
        return True

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    async def _write(self, data: bytes | None) -> None:
        if data:
            if self._lost is not None:
                raise ConnectionResetError("the client has gone")
            self._transport.write(data)
            await self._writable.wait()


def _cut_short(missing: int | None) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(f"the client closed the connection with {missing} bytes of the body to come")
