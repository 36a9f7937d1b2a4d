"""One client connection of the proxy: requests in, answers out, over h11. ``Front`` owns the socket's protocol state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import h11

READ_BYTES = 64 * 1024
HEAD_BYTES_MAX = 128 * 1024
IDLE_S = 600.0
BODY_STALL_S = 60.0
PIPELINE_BYTES_MAX = 1 << 20


class Front:
    """Reads one request after the other and writes their answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
        """The next piece of the request's body; None at its end. Raises ``ConnectionError`` when the client leaves."""
        if self.h11.they_are_waiting_for_100_continue:
            await self._write(self.h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                return None
            if event is not h11.NEED_DATA:
                raise ConnectionResetError("the client left in the middle of its request")
            async with asyncio.timeout(BODY_STALL_S):
                self.h11.receive_data(await self._reader.read(READ_BYTES))

    async def gone(self) -> None:
        """Returns when the client has closed its side; what it sends meanwhile is kept for its next request."""
        kept = 0
        while data := await self._reader.read(READ_BYTES):
            self.h11.receive_data(data)
            kept += len(data)
            if kept > PIPELINE_BYTES_MAX:
                await asyncio.Event().wait()  # never set: nothing more is read until the answer is out

    async def send(self, event: h11.Event) -> None:
        """Writes one event; waits only when the client does not keep up."""
        await self._write(self.h11.send(event))

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
