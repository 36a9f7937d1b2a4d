"""The server behind the proxy: its address, what it is, and idle connections to it. ``Upstream`` owns these.

HTTP/1.1 through h11 on asyncio streams: header names keep their spelling, bodies pass as they come. A connection is used
for one request at a time and kept for the next one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
import time
from typing import Literal, cast
from urllib.parse import urlsplit

import h11

Kind = Literal["tenuto", "local", "hosted"]

CONNECT_S = 5.0
PROBE_S = 4.0
IDLE_S = 30.0
IDLE_MAX = 32
READ_BYTES = 256 * 1024
WAITING_BYTES_MAX = 1 << 20
COPIED_BYTES_MAX = 64 * 1024
HEAD_BYTES_MAX = 128 * 1024


class Unreachable(OSError):
    """No connection to the upstream; the message says what was tried."""


class Link:
    """One connection to the upstream. ``fresh``: it has not served a request yet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self.fresh = True
        self.idle_since_s = 0.0
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: h11.Request | bytes | bytearray | memoryview | h11.EndOfMessage) -> None:
        """Writes the parts of a request, of its body as bytes; waits only when the peer does not keep up."""
        small: list[bytes] = []  # h11 gives out every header by itself: one system call for all of them
        for part in parts:
            # Whatever has a length is a body for h11, and passes as it is.
            event = part if isinstance(part, (h11.Request, h11.EndOfMessage)) else h11.Data(data=cast(bytes, part))
            for piece in self.h11.send_with_data_passthrough(event) or ():
                if len(piece) <= COPIED_BYTES_MAX:
                    small.append(piece)
                    continue
                rest = memoryview(piece)  # a system call more costs less than another copy of all that
                self._writer.write(b"".join([*small, rest[:COPIED_BYTES_MAX]]))
                self._writer.write(rest[COPIED_BYTES_MAX:])
                small = []
        if small:
            self._writer.write(b"".join(small))
        await self._writer.drain()

    def ready(self) -> h11.Event | None:
        """The next event where it has arrived with the one before; None otherwise."""
        event = self.h11.next_event()
        return event if isinstance(event, h11.Event) else None

    async def receive(self) -> h11.Event | type[h11.PAUSED]:
        """The next event. Raises ``ConnectionError`` when the upstream closes in the middle of an answer."""
        while True:
            event = self.h11.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is h11.PAUSED:
                return h11.PAUSED
            data = await self._reader.read(READ_BYTES)
            if not data and self.h11.their_state is h11.SEND_RESPONSE:
                raise ConnectionResetError("the upstream closed the connection before it answered")
            self.h11.receive_data(data)

    @property
    def usable(self) -> bool:
        """Whether an idle connection can take another request."""
        return not self._reader.at_eof() and time.monotonic() - self.idle_since_s < IDLE_S

    def close(self) -> None:
        """Drops the connection; an answer still under way is cancelled at the upstream by this."""
        self._writer.close()


class Upstream:
    """``url``: with or without ``/v1``, http or https, possibly with a path of its own. ``kind``: what it is, where the
    user says so; otherwise a public address is a hosted service, and anything else is asked."""

    def __init__(self, url: str, kind: Kind | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https address: {url!r}")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.name = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.given = kind
        self.kind: Kind = kind or ("hosted" if _is_public(self.name) else "tenuto")
        self._idle: list[Link] = []

    @property
    def hosted(self) -> bool:
        """A service of somebody else: every byte passes as it is, and no hints are sent."""
        return self.kind == "hosted"

    async def probe(self) -> bool:
        """Asks a server of one's own what it is; False when it does not answer. A hosted service is not asked."""
        if self.hosted or self.given is not None:
            return True
        try:
            async with asyncio.timeout(PROBE_S):
                status, body = await self.get("/")
        except (OSError, TimeoutError, h11.ProtocolError):
            return False  # it may still be starting: what is sent to Tenuto harms no other server
        self.kind = "tenuto" if status == 200 and _says_tenuto(body) else "local"
        return True

    async def get(self, path: str, key: str | None = None) -> tuple[int, bytes]:
        """One small GET: status and body. Raises ``OSError`` and ``h11.ProtocolError``."""
        link = await self.connect()
        headers = [(b"Host", self.host_header), (b"Accept", b"application/json"), (b"Connection", b"close")]
        if key:
            headers.append((b"Authorization", b"Bearer " + key.encode()))
        try:
            await link.send(h11.Request(method="GET", target=self.path + path, headers=headers), h11.EndOfMessage())
            status, body = 0, b""
            while True:
                event = await link.receive()
                if isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return status, body
        finally:
            link.close()

    async def take(self) -> Link:
        """An idle connection, or a new one. Raises ``Unreachable``."""
        while self._idle:
            link = self._idle.pop()
            if link.usable:
                return link
            link.close()
        return await self.connect()

    async def connect(self) -> Link:
        """A new connection. Raises ``Unreachable``."""
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self.name,
                    self.port,
                    ssl=self.tls,
                    server_hostname=self.name if self.tls else None,
                    limit=WAITING_BYTES_MAX,
                )
        except TimeoutError:
            raise Unreachable(f"{self.url} did not accept a connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise Unreachable(f"no connection to {self.url}: {error.strerror or error}") from None
        return Link(reader, writer)

    def give_back(self, link: Link) -> None:
        """Keeps a connection whose answer was read to its end; closes any other."""
        if link.h11.our_state is h11.DONE and link.h11.their_state is h11.DONE and len(self._idle) < IDLE_MAX:
            link.h11.start_next_cycle()
            link.fresh, link.idle_since_s = False, time.monotonic()
            self._idle.append(link)
        else:
            link.close()

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().close()


def _is_public(host: str) -> bool:
    """Whether a host is out in the internet: a public address, or a name with a dot that is no local one."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.lower().rstrip(".")
        local = (".local", ".lan", ".internal", ".localhost", ".home.arpa", ".svc", ".cluster.local")
        return "." in name and not name.endswith(local)


def _says_tenuto(body: bytes) -> bool:
    try:
        parsed = json.loads(body)
    except ValueError:
        return False
    return isinstance(parsed, dict) and parsed.get("server") == "tenuto"
