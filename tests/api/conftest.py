"""A real server on a loopback socket, over the real engine loop.

``ScriptedEngine`` writes answers that a test dictates, where the test is about the text; ``NullExecutor`` under the real
``Engine`` is used where it is about the engine (``live`` in ``test_live``).
"""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import uvicorn

from tenuto.wire import Divergence, Receipt, SessionView
from tenuto_server.api.app import WEBSOCKETS, create_app
from tenuto_server.api.limits import HttpProtocol
from tenuto_server.api.service import Patience, ServedModel, Service
from tenuto_server.cache.integrity import check
from tenuto_server.config import ServerConfig
from tenuto_server.engine.events import CancelTurn, Event, HintBatch, PauseInferred, QuerySessions, StopTurn, SubmitTurn
from tenuto_server.engine.loop import EngineLoop
from tenuto_server.engine.plan import (
    HintsDone,
    Output,
    Report,
    SessionsOut,
    StepPlan,
    TokensOut,
    TurnDone,
    TurnRejected,
    TurnStarted,
)
from tenuto_server.model.toy import toy_chat, toy_config, toy_tokenizer
from tenuto_server.runtime.null import NullExecutor

TOKENIZER = toy_tokenizer()


class ScriptedEngine:
    """Answers every turn with the tokens of ``script(turn)``, ``per_step`` at a time, every ``step_s`` seconds.

    Lists what it was told (``turns``, ``stopped``, ``cancelled``, ``pauses``, ``batches``) and what is still open.
    """

    def __init__(self) -> None:
        self.script: Callable[[SubmitTurn], Sequence[int]] = lambda turn: TOKENIZER.encode("hello world")
        self.per_step, self.step_s, self.admit_after_s = 1, 0.0, 0.0
        self.reject: TurnRejected | None = None
        self.crash = False
        self.divergence: Divergence | None = None
        self.receipts: tuple[Receipt, ...] | None = None
        self.sessions: dict[str, SessionView] = {}
        self.turns: list[SubmitTurn] = []
        self.stopped: list[StopTurn] = []
        self.cancelled: list[str] = []
        self.pauses: list[PauseInferred] = []
        self.batches: list[HintBatch] = []
        self.open: dict[str, tuple[SubmitTurn, list[int], int]] = {}
        self.held: list[tuple[int, SubmitTurn]] = []
        self._next_ns = 0

    def metrics(self) -> dict[str, float | dict[str, float]]:
        return {
            "turns_running": float(len(self.open)),
            "tokens_cached_total": {"device": 3.0, "host": 2.0, "disk": 0.0},
        }

    def step(self, now_ns: int, events: Sequence[Event]) -> StepPlan:
        if self.crash and events:
            raise RuntimeError("scripted crash")
        out: list[Output] = []
        for event in events:
            out += self._on(event, now_ns)
        out += self._admit(now_ns)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + int(self.step_s * 1e9)
            for request_id in list(self.open):
                out += self._advance(request_id)
        waits = [self._next_ns] * bool(self.open) + [due for due, _ in self.held]
        return StepPlan(None, (), tuple(out), min(waits) if waits else None)

    def _on(self, event: Event, now_ns: int) -> list[Output]:
        match event:
            case SubmitTurn():
                self.turns.append(event)
                if self.reject is not None:
                    return [dataclasses.replace(self.reject, request_id=event.request_id)]
                self.held.append((now_ns + int(self.admit_after_s * 1e9), event))
            case StopTurn():
                self.stopped.append(event)
                if event.request_id in self.open:
                    turn, _, _ = self.open.pop(event.request_id)
                    return [TurnDone(event.request_id, "stop", event.keep_tokens, self._report(turn))]
            case CancelTurn():
                self.cancelled.append(event.request_id)
                self.open.pop(event.request_id, None)
            case PauseInferred():
                self.pauses.append(event)
            case HintBatch():
                self.batches.append(event)
                each = tuple(Receipt(action_id=a.action_id, outcome="accepted") for a in event.envelope.actions)
                return [HintsDone(event.ticket, each if self.receipts is None else self.receipts)]
            case QuerySessions():
                views = [v for name, v in self.sessions.items() if event.session in (None, name)]
                return [SessionsOut(event.ticket, tuple(views))]
        return []

    def _report(self, turn: SubmitTurn) -> Report:
        return Report(
            session=turn.session or "chain-1",
            prompt_tokens=len(turn.tokens),
            cached={"device": 3, "host": 2},
            recomputed={"cold": len(turn.tokens) - 5},
            divergence=self.divergence,
        )

    def _admit(self, now_ns: int) -> list[Output]:
        out: list[Output] = []
        for due, turn in self.held:
            if due <= now_ns and turn.request_id not in self.cancelled:
                report = self._report(turn)
                out.append(TurnStarted(turn.request_id, report.session or "", report))
                self.open[turn.request_id] = (turn, list(self.script(turn)), 0)
        self.held = [(due, turn) for due, turn in self.held if due > now_ns and turn.request_id not in self.cancelled]
        return out

    def _advance(self, request_id: str) -> list[Output]:
        turn, tokens, at = self.open[request_id]
        stop = min(at + self.per_step, len(tokens), turn.sampling.max_tokens)
        out: list[Output] = [TokensOut(request_id, tuple(tokens[at:stop]))] if stop > at else []
        self.open[request_id] = (turn, tokens, stop)
        if stop in (len(tokens), turn.sampling.max_tokens):
            del self.open[request_id]
            reason = "stop" if stop == len(tokens) else "length"
            out.append(TurnDone(request_id, reason, stop, self._report(turn)))
        return out


class Site:
    """A served service: its address, and plain requests to it."""

    def __init__(self, service: Service, engine, ws: str = WEBSOCKETS) -> None:
        self.service, self.engine = service, engine
        self.sockets: list[socket.socket] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = service.config
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(service),
                http=HttpProtocol,
                ws=ws,
                ws_max_size=config.body_bytes_max,
                h11_max_incomplete_event_size=4 * config.header_bytes_max,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self.socket]))

    def start(self) -> None:
        self.service.loop.start()
        self._thread.start()
        eventually(lambda: self._server.started)

    def stop(self) -> None:
        self.hang_up()
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.service.close(5)

    def hang_up(self) -> None:
        """Closes the sockets that tests opened."""
        for raw in self.sockets:
            raw.close()
        self.sockets.clear()

    def settle(self) -> None:
        """Over the real engine: waits until nothing runs; every block is accounted for then and none belongs to anybody."""
        cache = self.engine.core.cache
        eventually(lambda: not cache.tables)
        self.request("GET", "/v1/sessions")
        eventually(lambda: not cache.tiers.moves)
        check(cache)

    def request(self, method: str, path: str, body=None, headers=None):
        """(status, headers, parsed JSON or raw bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            data = answer.read()
            plain = {name.lower(): value for name, value in answer.getheaders()}
            kind = plain.get("content-type", "")
            return answer.status, plain, json.loads(data) if kind.startswith("application/json") else data

    def chat(self, text: str = "hi", headers=None, **fields):
        """A chat completion; returns what ``request`` does."""
        body = {"model": "toy", "messages": [{"role": "user", "content": text}], **fields}
        return self.request("POST", "/v1/chat/completions", body, headers)

    def stream(self, path: str = "/v1/chat/completions", headers=None, **fields):
        """(status, headers, list of events without [DONE]) of a stream read to its end."""
        body = {"model": "toy", "stream": True, **fields}
        if "prompt" not in fields:
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        status, plain, data = self.request("POST", path, body, headers)
        if status != 200:
            return status, plain, data
        assert data.endswith(b"data: [DONE]\n\n")
        lines = [line for line in data.decode().split("\n\n") if line.startswith("data: ")]
        return status, plain, [json.loads(line[6:]) for line in lines[:-1]]

    def open_stream(self, **fields) -> socket.socket:
        """Sends a streaming request on a bare socket and returns it unread."""
        body = json.dumps({"model": "toy", "stream": True, "messages": [{"role": "user", "content": "hi"}], **fields})
        raw = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall((head + body).encode())
        self.sockets.append(raw)
        return raw


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Waits for a condition that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition did not become true in time"
        time.sleep(0.005)


@pytest.fixture
def wait() -> Callable[..., None]:
    return eventually


def _sites() -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(
        engine=None,
        executor=None,
        *,
        patience: Patience | None = None,
        context: int = 4096,
        ws: str = WEBSOCKETS,
        **config,
    ) -> Site:
        engine = engine or ScriptedEngine()
        settings = ServerConfig(model="toy", **config)
        loop = EngineLoop(engine, executor or NullExecutor(), inbox_max=settings.inbox_max)
        model = ServedModel("toy", TOKENIZER, toy_chat(), toy_config().eos_ids, context, aliases=("toy-alias",))
        site = Site(Service(loop, model, settings, patience=patience or Patience()), engine, ws)
        sites.append(site)
        site.start()
        return site

    yield make
    for site in sites:
        site.stop()


@pytest.fixture
def make_site() -> Iterator[Callable[..., Site]]:
    """Starts sites; every one is stopped at the end of the test."""
    yield from _sites()


@pytest.fixture(scope="module")
def make_shared_site() -> Iterator[Callable[..., Site]]:
    """The same for sites that a whole module uses."""
    yield from _sites()


@pytest.fixture(scope="session")
def _served() -> Iterator[Site]:
    """One site for all tests that leave it as they found it: starting and stopping one costs 0.2 s."""
    engine = ScriptedEngine()
    loop = EngineLoop(engine, NullExecutor(), inbox_max=256)
    model = ServedModel("toy", TOKENIZER, toy_chat(), toy_config().eos_ids, 4096, aliases=("toy-alias",))
    config = ServerConfig(model="toy", body_bytes_max=200_000, header_bytes_max=16_384)
    site = Site(Service(loop, model, config), engine)
    site.start()
    yield site
    site.stop()


@pytest.fixture
def site(_served: Site) -> Site:
    """A site whose engine remembers nothing. Tests that break the engine or count from zero make their own."""
    assert _served.service.loop.healthy
    _served.hang_up()
    eventually(lambda: not _served.engine.open and not _served.engine.held)
    _served.request("GET", "/v1/sessions")  # what an earlier test's last answer set off comes before its answer
    _served.engine.__init__()
    return _served


@pytest.fixture(scope="module")
def shared_site(_served: Site) -> Site:
    """The same, reset once a module, for property tests."""
    _served.engine.__init__()
    return _served


@pytest.fixture(scope="session")
def site_class() -> type[Site]:
    return Site


@pytest.fixture(scope="session")
def tokenizer():
    return TOKENIZER
