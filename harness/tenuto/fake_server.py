"""Doubles that ship with the product: a fake server on loopback, a hint recorder, a virtual clock.

``FakeServer`` owns its requests, scripted replies and one prompt for each session, from which it computes what a prefix
cache would have kept; ``HintRecorder`` owns the hints. A token is four characters of canonical JSON here. It speaks Chat
Completions, Messages and Responses (streamed or not) and KV hints (posted, in the body, in the header), over a real socket.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from tenuto.answers import dialect_of
from tenuto.fake_dialects import Event, prompt_parts, translated
from tenuto.headers import HINTS_HEADER, HeaderError, decode_hints, read_identity
from tenuto.prefix import Fingerprint, divergence, fingerprint
from tenuto.wire import AnyAction, Envelope, Lease, Receipt, Receipts

CHARS_PER_TOKEN = 4


class VirtualClock:
    """Seconds that pass only when told: ``clock()`` reads, ``clock.advance(60)`` moves."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward."""
        self._now_s += seconds


@dataclass(frozen=True, slots=True)
class SeenHint:
    """One hint that arrived. ``via``: post, body or header."""

    action: AnyAction
    via: str


class HintRecorder:
    """Every hint that arrived, in order. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: list[SeenHint] = []

    def add(self, action: AnyAction, via: str) -> None:
        """Records one hint."""
        with self._changed:
            self._seen.append(SeenHint(action, via))
            self._changed.notify_all()

    @property
    def seen(self) -> list[SeenHint]:
        """All hints so far."""
        with self._changed:
            return list(self._seen)

    def of_type(self, action_type: str) -> list[Any]:
        """The actions of one type, such as ``agent.pause``."""
        return [hint.action for hint in self.seen if action_type == hint.action.TYPE]

    def types(self) -> list[str]:
        """The types of all hints in order of arrival."""
        return [hint.action.TYPE for hint in self.seen]

    def wait_for(self, action_type: str, count: int = 1, timeout_s: float = 5.0) -> list[Any]:
        """Waits until ``count`` hints of a type have come and returns them. Raises ``AssertionError`` if they do not."""
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = [hint.action for hint in self._seen if action_type == hint.action.TYPE]
                if len(found) >= count:
                    return found
                if not self._changed.wait(max(0.0, give_up - time.monotonic())):
                    types = [hint.action.TYPE for hint in self._seen]
                    raise AssertionError(
                        f"{len(found)} of {count} {action_type} hints came within {timeout_s} s: {types}"
                    )


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says: text, or calls of tools as (name, arguments)."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request that arrived; header names are lower case."""

    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(slots=True)
class Faults:
    """What the fake server does wrong. Delays are seconds. Statuses are used up one by one, oldest first."""

    chat_delay_s: float = 0.0
    hint_delay_s: float = 0.0
    hint_status: int = 200
    chat_statuses: deque[tuple[int, dict[str, str]]] = field(default_factory=deque)
    cut_stream_after: int | None = None


class FakeServer:
    """A server for tests of agents: starts on entry, on a free port of the loopback interface.

    ``url``: for ``base_url``. ``requests``, ``hints``: what arrived. ``reply()`` scripts the next answer; without one the
    answer is ``ok``. ``lease_s``: of the lease that a pause is granted; None: none is. ``faults``: what goes wrong.
    """

    def __init__(self) -> None:
        self.requests: list[SeenRequest] = []
        self.hints = HintRecorder()
        self.lease_s: float | None = 60.0
        self.faults = Faults()
        self.outcome: Callable[[AnyAction], tuple[str, str]] = lambda action: ("accepted", "")
        self._replies: deque[Reply] = deque()
        self._prompts: dict[str, Fingerprint] = {}
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._http: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def reply(self, text: str = "", *calls: tuple[str, Mapping[str, Any]]) -> None:
        """Scripts the next answer: its text, and tool calls as (name, arguments)."""
        self._replies.append(Reply(text, calls))

    def fail(self, status: int, times: int = 1, **headers: str) -> None:
        """Has the next ``times`` chat requests fail with ``status``."""
        self.faults.chat_statuses.extend([(status, headers)] * times)

    @property
    def url(self) -> str:
        """Base URL, without ``/v1``."""
        if self._http is None:
            raise RuntimeError("the fake server has not been started")
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def chats(self) -> list[SeenRequest]:
        """The generation requests that arrived, in any dialect."""
        return [r for r in self.requests if dialect_of(r.path) is not None]

    def start(self) -> FakeServer:
        """Starts serving."""
        server = self

        class Handler(_Handler):
            fake = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops serving; answers in progress may be cut off."""
        if self._http is not None and self._thread is not None:
            self._http.shutdown()
            self._http.server_close()
            self._thread.join()
            self._http = None

    def __enter__(self) -> FakeServer:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- called by the handler ------------------------------------------------------------------------------------------

    def take_hints(self, envelope: Envelope, via: str) -> tuple[Receipt, ...]:
        """Records the hints of an envelope and answers them."""
        receipts = []
        for item in envelope.actions:
            try:
                action = item.parse()
            except ValidationError:
                action = None
            if action is None:
                receipts.append(Receipt(action_id=item.action_id, outcome="rejected", reason="unknown or invalid"))
                continue
            self.hints.add(action, via)
            outcome, reason = self.outcome(action)
            granted_s = self.lease_s if action.TYPE == "agent.pause" else None
            lease = None if granted_s is None else Lease(until_s=granted_s, tier="device", tokens=64)
            receipts.append(
                Receipt.model_validate(
                    {"action_id": item.action_id, "outcome": outcome, "reason": reason, "lease": lease}
                )
            )
        return tuple(receipts)

    def answer(self, request: SeenRequest, started_s: float) -> dict[str, Any]:
        """The completion object for a chat request."""
        receipts = self._carried(request)
        identity = read_identity(request.headers)
        with self._lock:
            reply = self._replies.popleft() if self._replies else Reply("ok")
            number = next(self._ids)
            report = self._cache(identity.session, identity.parent, request.body)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
        if reply.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(reply.calls)
            ]
        cached = sum(report["cached"].values())
        answer_tokens = max(1, len(json.dumps(message)) // CHARS_PER_TOKEN)
        report["receipts"] = [r.model_dump(exclude_none=True) for r in receipts]
        report["ttft_s"] = round(time.monotonic() - started_s, 6)
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.body.get("model", "fake"),
            "choices": [
                {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.calls else "stop"},
            ],
            "usage": {
                "prompt_tokens": report["prompt_tokens"],
                "completion_tokens": answer_tokens,
                "total_tokens": report["prompt_tokens"] + answer_tokens,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
            "tenuto": report,
        }

    def _carried(self, request: SeenRequest) -> tuple[Receipt, ...]:
        receipts: tuple[Receipt, ...] = ()
        if HINTS_HEADER in request.headers:
            with contextlib.suppress(HeaderError):
                receipts += self.take_hints(decode_hints(request.headers[HINTS_HEADER]), "header")
        if isinstance(request.body.get("kv_hints"), dict):
            receipts += self.take_hints(Envelope.model_validate(request.body["kv_hints"]), "body")
        return receipts

    def _cache(self, session: str | None, parent: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
        messages, system = prompt_parts(body)
        prompt = fingerprint(messages, body.get("tools"), system)
        total = max(1, prompt.chars // CHARS_PER_TOKEN)
        before = self._prompts.get(session or "") or self._prompts.get(parent or "")
        report = divergence(before, prompt) if before is not None else None
        kept_chars = 0 if before is None else (before.chars if report is None else report.shared_chars)
        kept = min(kept_chars // CHARS_PER_TOKEN, total - 1)
        lost = 0 if before is None or report is None else min(report.lost_chars // CHARS_PER_TOKEN, total - kept)
        if session is not None:
            self._prompts[session] = prompt
        out: dict[str, Any] = {
            "session": session,
            "prompt_tokens": total,
            "cached": {"device": kept},
            "recomputed": {"cold": total - kept - lost},
        }
        if lost and report is not None:
            out["recomputed"]["mutation"] = lost
            part = "message" if report.part == "messages" else report.part
            out["divergence"] = {
                "token": kept,
                "tokens_lost": lost,
                "message": report.index if part == "message" else None,
                "role": report.role,
                "part": part,
            }
        return out


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Stays quiet."""

    def do_GET(self) -> None:
        if self.path == "/":
            self._json(200, {"server": "tenuto"})
        elif self.path == "/health":
            self._json(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 131072}]})
        else:
            self._json(404, {"error": {"message": f"no path {self.path}", "type": "not_found_error"}})

    def do_POST(self) -> None:
        started_s = time.monotonic()
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = SeenRequest(self.path, headers, json.loads(raw or b"{}"))
        self.fake.requests.append(request)
        try:
            if self.path == "/v1/kv_hints":
                self._hints(request)
            elif (dialect := dialect_of(self.path)) is not None:
                self._chat(request, dialect, started_s)
            else:
                self._json(404, {"error": {"message": f"no path {self.path}", "type": "not_found_error"}})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client has gone

    def _hints(self, request: SeenRequest) -> None:
        faults = self.fake.faults
        time.sleep(faults.hint_delay_s)
        if faults.hint_status != 200:
            self._json(faults.hint_status, {"error": {"message": "hints refused", "type": "fault"}})
            return
        envelope = Envelope.model_validate(request.body)
        receipts = Receipts(message_id=envelope.message_id, receipts=self.fake.take_hints(envelope, "post"))
        self._json(200, receipts.model_dump(mode="json", exclude_none=True))

    def _chat(self, request: SeenRequest, dialect: str, started_s: float) -> None:
        faults = self.fake.faults
        time.sleep(faults.chat_delay_s)
        if faults.chat_statuses:
            status, headers = faults.chat_statuses.popleft()
            error = {"message": "scripted failure", "type": "fault", "code": "scripted", "param": "messages"}
            self._json(status, {"error": error}, headers)
            return
        body = self.fake.answer(request, started_s)
        if dialect == "chat":
            events: list[Event] = [(None, chunk) for chunk in _chunks(body)]
        else:
            body, events = translated(dialect, body)
        if request.body.get("stream"):
            self._stream(body, events, faults.cut_stream_after)
        else:
            self._json(200, body)

    def _stream(self, body: dict[str, Any], events: Sequence[tuple[str | None, Any]], cut_after: int | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-request-id", body["id"])
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, (name, chunk) in enumerate(events):
            if number == cut_after:
                self.close_connection = True
                return
            head = f"event: {name}\n" if name else ""
            self._piece(f"{head}data: {json.dumps(chunk)}\n\n".encode())
        if events[0][0] is None:
            self._piece(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _piece(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("x-request-id", body.get("id") or "req-fake")
        for name, value in (headers or {}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


def _chunks(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A completion object as the chunks of a stream: text in pieces of six characters, arguments in two."""
    message = body["choices"][0]["message"]
    base = {"id": body["id"], "object": "chat.completion.chunk", "created": body["created"], "model": body["model"]}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    text = message["content"] or ""
    deltas += [{"content": text[i : i + 6]} for i in range(0, len(text), 6)]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        half = len(arguments) // 2
        first = {"name": call["function"]["name"], "arguments": arguments[:half]}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[half:]}}]})
    chunks = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    finish = {"index": 0, "delta": {}, "finish_reason": body["choices"][0]["finish_reason"]}
    usage = {"usage": body["usage"], "tenuto": body["tenuto"]}
    return [*chunks, {**base, "choices": [finish]}, {**base, "choices": [], **usage}]
