"""The proxy itself: listens on loopback, forwards requests, copies answers to the tracker. Owns connections and counts.

A body is held only until it is complete, so that its session can be named; of a large one the beginning goes ahead where
that can be guessed (``ahead``), and one that is larger than the tracker reads goes on in pieces, unread. An answer is passed
on piece by piece, each before it is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import h11

from tenuto.proxy.ahead import BODY_BYTES_MAX, READ_BODY_BYTES_MAX, Ahead, TooLarge, read_body
from tenuto.proxy.bodies import Body, decoded
from tenuto.proxy.front import Front, listen
from tenuto.proxy.normalise import normalised
from tenuto.proxy.reading import dialect
from tenuto.proxy.refusals import refusal
from tenuto.proxy.tracker import Guess, Ticket, Tracker
from tenuto.proxy.upstream import Link, Unreachable, Upstream

CONNECTIONS_MAX = 512
COPY_BYTES_MAX = 8 << 20
STUDY_AFTER_S = 0.02
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
STATUS_PATH = "/_tenuto/status"
HOOK_PATH = "/hook"
RUN_PATH = "/run/"

OnHook = Callable[[str, bytes], None]
Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Outgoing:
    """A request as it goes upstream. ``ahead``: its beginning went already; ``rest``: more of its body is still to come in."""

    head: h11.Request
    body: Body
    ahead: Ahead | None = None
    rest: bool = False


class ProxyServer:
    """``tracker``: sees every generation; ``on_hook``: gets the path and body of every hook call; ``normalise``: parts of
    ``normalise.PARTS`` to rewrite, by default the attribution line for a server of one's own, and nothing for others."""

    def __init__(
        self, upstream: Upstream, tracker: Tracker, on_hook: OnHook, normalise: frozenset[str] | None = None
    ) -> None:
        self.upstream = upstream
        self.tracker = tracker
        self.counts: Counter[str] = Counter()
        self.port = 0
        self.host = ""
        self._on_hook = on_hook
        self._normalise = normalise
        self._fronts: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._started_s = time.monotonic()

    @property
    def url(self) -> str:
        """Where clients find the proxy, without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens; port 0 takes a free one. Raises ``OSError``."""
        self._listener = await listen(host, port, self._connected)
        self.host, self.port = self._listener.sockets[0].getsockname()[:2]

    async def aclose(self) -> None:
        """Stops listening, drops connections; answers under way are cut off."""
        if self._listener is not None:
            self._listener.close()
        for task in list(self._fronts):
            task.cancel()
        await asyncio.gather(*self._fronts, return_exceptions=True)
        self.upstream.close()

    # -- connections ------------------------------------------------------------------------------------------------

    async def _connected(self, front: Front) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._fronts.add(task)
        try:
            while (request := await front.request()) is not None:
                await self._serve(front, request)
                if not front.next_cycle():
                    break
        except h11.RemoteProtocolError as error:
            self.counts["bad_requests"] += 1
            with contextlib.suppress(h11.LocalProtocolError, OSError):
                if not front.started:
                    await front.answer(error.error_status_hint, refusal(None, 400, "bad_request", str(error)))
        except (OSError, TimeoutError, h11.LocalProtocolError):
            self.counts["clients_lost"] += 1
        except asyncio.CancelledError:
            pass  # the proxy closes: its connections end quietly
        finally:
            self._fronts.discard(task)
            front.close()

    async def _serve(self, front: Front, request: h11.Request) -> None:
        target = request.target.decode("latin-1")
        run, target = _split_run(target)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        method = request.method.decode("latin-1")
        if len(self._fronts) > CONNECTIONS_MAX:
            self.counts["refused"] += 1
            body = refusal(dialect(target), 503, "too_many_connections", "the proxy has too many connections open")
            await front.answer(503, body, [("connection", "close")])
            return
        if target.startswith(HOOK_PATH) or target == STATUS_PATH:
            await self._own(front, method, target)
            return
        if headers.get("upgrade", "").lower() == "websocket":
            await _skip_body(front)
            # Clients that offer a socket fall back to plain requests on this status.
            await front.answer(426, refusal(dialect(target), 426, "no_websocket", "use plain HTTP requests"))
            return
        if method == "HEAD" and target == "/" and not self.upstream.hosted:
            await _skip_body(front)
            await front.answer(200, b"", head_only=True)
            return
        try:
            await self._forward(front, request, headers, target, run)
        except TooLarge as error:
            self.counts["refused"] += 1
            await front.answer(413, refusal(dialect(target), 413, "too_large", str(error)), [("connection", "close")])

    async def _own(self, front: Front, method: str, target: str) -> None:
        """Paths of the proxy itself. A hook is always answered with success: it must never stop an agent."""
        body = b""
        while (piece := await front.body()) is not None:
            body = body + piece if len(body) < READ_BODY_BYTES_MAX else body
        if target == STATUS_PATH:
            await front.answer(200, json.dumps(self.status()).encode())
            return
        await front.answer(200, b"{}", head_only=method == "HEAD")
        if method == "POST":
            self.counts["hooks"] += 1
            self._on_hook(target, body)

    def status(self) -> dict[str, object]:
        """Counts and the session tree, without any text."""
        return {
            "upstream": self.upstream.url,
            "kind": self.upstream.kind,
            "up_s": round(time.monotonic() - self._started_s, 1),
            "counts": dict(self.counts),
            "hints": self.tracker.hint_counts(),
            "inference_errors": self.tracker.errors,
            "sessions": self.tracker.view(),
        }

    # -- forwarding -------------------------------------------------------------------------------------------------

    async def _forward(
        self, front: Front, request: h11.Request, headers: dict[str, str], target: str, run: str
    ) -> None:
        self.counts["requests"] += 1
        form, guess = dialect(target), None

        async def begin(start: bytearray, size: int) -> Ahead | None:
            nonlocal guess
            guess = self.tracker.guess(target, headers, memoryview(start)[:size], run)
            return await self._begin(request, headers, target, start, size, guess)

        whole, complete, ahead = await read_body(front, begin)
        body, plain = whole, False
        if complete and form is not None:
            body, plain = self._prepared(form, headers, body)
            if plain:
                headers = {name: value for name, value in headers.items() if name != "content-encoding"}
        ticket = self.tracker.open(target, headers, body if complete else b"", run, guess)
        if ticket is not None and ticket.node is not None:
            ticket.node.rewritten = body is not whole
        extra = ticket.extra if ticket is not None else {}
        head = self._head(request, target, extra, len(body) if complete else None, plain)
        if ahead is not None and (body is not whole or ahead.head != head):
            self.counts["guessed_wrong"] += 1
            ahead.link.close()
            ahead = None
        outgoing = Outgoing(head, body, ahead, rest=not complete)
        if not complete:
            await self._relay(front, outgoing, ticket)
            return
        task, gone = asyncio.current_task(), False

        def cancel() -> None:
            nonlocal gone
            gone = True
            assert task is not None
            task.cancel()

        front.when_gone(cancel)
        try:
            await self._relay(front, outgoing, ticket)
        except asyncio.CancelledError:
            if not gone:
                raise  # the proxy itself is closing
            self.counts["cancelled"] += 1
            raise ConnectionResetError("the client left") from None
        finally:
            front.when_gone(None)

    async def _begin(
        self,
        request: h11.Request,
        headers: dict[str, str],
        target: str,
        start: bytearray,
        size: int,
        guess: Guess | None,
    ) -> Ahead | None:
        """Sends the head and the beginning of a request, unless its body may have to be rewritten."""
        parts = self._parts
        rewrites = (
            bool(headers.get("content-encoding"))
            or "tools" in parts
            or start.find(b"x-anthropic-billing-header", 0, size) >= 0
        )
        if guess is None or (parts and (rewrites or (guess.node is not None and guess.node.rewritten))):
            return None
        head = self._head(request, target, guess.extra, int(headers["content-length"]), False)
        link: Link | None = None
        try:
            link = await self.upstream.take()
            await link.send(head, memoryview(start)[:size])
        except BaseException as error:
            if link is not None:
                link.close()
            if isinstance(error, (OSError, TimeoutError)):
                return None  # what is wrong shows again when the whole is sent
            raise
        self.counts["went_ahead"] += 1
        return Ahead(link, head, size)

    @property
    def _parts(self) -> frozenset[str]:
        """What is rewritten in bodies."""
        if self._normalise is not None:
            return self._normalise
        return frozenset() if self.upstream.hosted else frozenset({"attribution"})

    def _prepared(self, form: str, headers: dict[str, str], body: Body) -> tuple[Body, bool]:
        """A body as it goes upstream, and whether it was unpacked for that: only Tenuto is known to unpack bodies."""
        parts = self._parts
        coding = headers.get("content-encoding", "")
        if not parts or (coding and self.upstream.kind == "tenuto"):
            return body, False
        plain = decoded(body, coding)
        return (body, False) if plain is None else (normalised(form, plain, parts), bool(coding))

    async def _relay(self, front: Front, outgoing: Outgoing, ticket: Ticket | None) -> None:
        link: Link | None = None
        form = ticket.form if ticket is not None else None
        try:
            link, response = await self._ask(front, outgoing, ticket)
            await self._pass_on(front, link, response, ticket)
            self.upstream.give_back(link)
            link = None
        except (OSError, TimeoutError, h11.RemoteProtocolError) as error:
            self.counts["failed"] += 1
            if front.started:
                raise ConnectionResetError("the answer broke off") from error
            unreachable = isinstance(error, Unreachable)
            text = (
                str(error) if unreachable else f"{self.upstream.url} closed the connection without an answer: {error}"
            )
            advice = "Is the server running? The proxy's --upstream names it." if unreachable else "Try again."
            kind = "upstream_unreachable" if unreachable else "upstream_failed"
            extra = [("connection", "close")] if outgoing.rest else []
            await front.answer(502, refusal(form, 502, kind, f"tenuto proxy: {text}. {advice}"), extra)
        finally:
            if ticket is not None:
                self.tracker.study(ticket)
                self.tracker.failed(ticket)  # no effect once the answer has been read
            if link is not None:
                link.close()

    async def _ask(self, front: Front, outgoing: Outgoing, ticket: Ticket | None) -> tuple[Link, h11.Response]:
        """Sends the request and waits for the head of its answer; once more when an idle connection turned out dead."""
        head, body, ahead = outgoing.head, outgoing.body, outgoing.ahead
        link = ahead.link if ahead is not None else await self.upstream.take()
        while True:
            fresh = link.fresh
            try:
                if ahead is not None:
                    rest, ahead = memoryview(body)[ahead.sent :], None
                    await link.send(rest, h11.EndOfMessage())
                elif outgoing.rest:
                    await link.send(head, body)
                    await _send_rest(front, link, len(body))
                else:
                    await link.send(head, body, h11.EndOfMessage())
                if ticket is not None and not ticket.studied:
                    # Reading a large body takes milliseconds: not before a quick answer has had its chance to pass.
                    asyncio.get_running_loop().call_later(STUDY_AFTER_S, self.tracker.study, ticket)
                event = await link.receive()
                while isinstance(event, h11.InformationalResponse):
                    event = await link.receive()
                if isinstance(event, h11.Response):
                    return link, event
                raise ConnectionResetError("no answer came")
            except ConnectionError:
                link.close()
                if fresh or outgoing.rest:
                    raise
                link = await self.upstream.connect()
            except BaseException:
                link.close()
                raise

    async def _pass_on(self, front: Front, link: Link, response: h11.Response, ticket: Ticket | None) -> None:
        headers: Headers = [(n, v) for n, v in response.headers.raw_items() if n.lower() not in HOP_BY_HOP]
        told = dict(response.headers)
        readable = told.get(b"content-encoding", b"identity") == b"identity"
        copy: list[bytes] | None = [] if ticket is not None and response.status_code < 300 and readable else None
        size = 0
        waiting: list[h11.Event] = [
            h11.Response(status_code=response.status_code, headers=headers, reason=bytes(response.reason))
        ]
        while (event := await self._next(front, link, waiting)) is not None:
            waiting.append(event)
            size += len(event.data)
            if copy is not None:
                copy.append(bytes(event.data))
                copy = copy if size <= COPY_BYTES_MAX else None
        await front.send(*waiting, h11.EndOfMessage())
        if ticket is not None:
            self.tracker.study(ticket)
        if ticket is not None and copy:
            streamed = b"text/event-stream" in told.get(b"content-type", b"")
            self.tracker.answered(ticket, b"".join(copy), streamed=streamed)

    async def _next(self, front: Front, link: Link, waiting: list[h11.Event]) -> h11.Data | None:
        """The next piece of an answer; None at its end. What waits goes out before there is anything to wait for."""
        event: object = None
        try:
            event = link.ready()
        finally:
            if event is None or not isinstance(event, (h11.Data, h11.EndOfMessage)):
                await front.send(*waiting)
                waiting.clear()
        if event is None:
            event = await link.receive()
        if isinstance(event, h11.EndOfMessage):
            return None
        if not isinstance(event, h11.Data):
            raise ConnectionResetError("the upstream closed the connection in the middle of its answer")
        return event

    def _head(
        self, request: h11.Request, target: str, told: dict[str, str], length: int | None, plain: bool
    ) -> h11.Request:
        """The request's head as it goes upstream. ``told``: headers of ours; ``plain``: the body has been unpacked."""
        extra = {name.encode(): value.encode("utf-8", "replace") for name, value in told.items()}
        if not self.upstream.hosted:
            extra[b"accept-encoding"] = b"identity"  # the copy is read as it comes
        replaced = {b"host", *extra}
        if length is not None:
            replaced.add(b"content-length")
        if plain:
            replaced.add(b"content-encoding")
        headers: Headers = [(b"Host", self.upstream.host_header)]
        headers += [
            (name, value)
            for name, value in request.headers.raw_items()
            if name.lower() not in replaced and name.lower() not in HOP_BY_HOP
        ]
        headers += extra.items()
        if length is None:
            if not any(name.lower() == b"content-length" for name, _ in headers):
                headers.append((b"Transfer-Encoding", b"chunked"))
        elif length or request.method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            headers.append((b"Content-Length", str(length).encode()))
        return h11.Request(method=request.method, target=self.upstream.path + target, headers=headers)


def _split_run(target: str) -> tuple[str, str]:
    """``/run/NAME/v1/...``: the name of a client of a shared proxy, and the path without it."""
    if not target.startswith(RUN_PATH):
        return "", target
    name, slash, rest = target[len(RUN_PATH) :].partition("/")
    return name[:64], slash + rest or "/"


async def _skip_body(front: Front) -> None:
    while await front.body() is not None:
        pass


async def _send_rest(front: Front, link: Link, sent: int) -> None:
    while (piece := await front.body()) is not None:
        sent += len(piece)
        if sent > BODY_BYTES_MAX:
            raise TooLarge(f"the body exceeds {BODY_BYTES_MAX} bytes")
        await link.send(piece)
    await link.send(h11.EndOfMessage())
