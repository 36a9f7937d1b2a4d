"""What every route needs, in one object: the engine loop, the model's text side, the settings, the meters.

Owned by the process; routes find it in ``app.state.service``. ``Pump`` owns the passage from the engine thread to the
event loop, ``Mailbox`` the outputs of one request on the event loop's side.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from tenuto_server.api.alarm import Alarm
from tenuto_server.api.auth import KeyRing
from tenuto_server.api.constrain import Constraint, Grammars, compiled
from tenuto_server.api.errors import ApiError, busy
from tenuto_server.api.meters import Meters
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.responses_store import ResponseStore
from tenuto_server.api.toolformat import tool_format
from tenuto_server.api.traffic import Traffic
from tenuto_server.config import ServerConfig
from tenuto_server.engine.events import HintBatch, QuerySessions, SubmitTurn
from tenuto_server.engine.loop import Deliver, EngineDead, EngineLoop, InboxFull
from tenuto_server.engine.plan import Output, TokensOut
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.tokenizer import Tokenizer

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection; nobody reads what would be answered."""


class Mailbox:
    """Outputs of one request. ``deliver`` is for the engine thread, everything else for the event loop.

    ``relay``: who is offered the tokens that come while ``take`` waits, and says whether they are dealt with.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._outputs: list[Output] = []
        self._gone = False
        self._waiter: asyncio.Future[None] | None = None
        self.relay: Callable[[TokensOut], bool] | None = None
        self._relayed_at = 0.0
        self._error: Exception | None = None

    def deliver(self, output: Output) -> None:
        """Hands an output over; returns at once."""
        self._pump.push(self, output)

    def put(self, output: Output) -> None:
        """An output arrived on the event loop."""
        waits = self._waiter is not None and not (self._outputs or self._gone or self._error)
        if waits and self.relay is not None and isinstance(output, TokensOut):
            try:
                if self.relay(output):
                    self._relayed_at = time.monotonic()
                    return
            except Exception as error:  # it concerns this request only, whose task is waiting in take
                self._error = error
                self._wake()
                return
        self._outputs.append(output)
        self._wake()

    def hang_up(self) -> None:
        """The client went away: the next ``take`` raises ``ClientGone``."""
        self._gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _silent(self, timeout_s: float) -> None:
        left = self._relayed_at + timeout_s - time.monotonic()
        if left > 0:
            self._pump.alarm.set(self, left, lambda: self._silent(timeout_s))
        else:
            self._wake()

    async def take(self, timeout_s: float | None = None) -> list[Output]:
        """All outputs since the last call, at least one; empty when ``timeout_s`` passed with nothing said. What a slow reader does not
        take waits here merged into one list, bounded by the turn's ``max_tokens``."""
        if not (self._outputs or self._gone):
            self._waiter = self._pump.loop.create_future()
            if timeout_s is not None:
                self._pump.alarm.set(self, timeout_s, lambda: self._silent(timeout_s))
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._pump.alarm.lift(self)
        if self._gone:
            raise ClientGone
        if self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs


class Pump:
    """Carries outputs from the engine thread to one event loop, waking it once per step rather than once per output."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.alarm = loop, Alarm(loop)
        self._items: deque[tuple[Mailbox, Output]] = deque()
        self._armed = False

    def push(self, mailbox: Mailbox, output: Output) -> None:
        """From the engine thread."""
        self._items.append((mailbox, output))
        # Item first, flag second, and the other way round in _drain: an item is either seen by the drain that is under
        # way or arms the next one.
        if not self._armed:
            self._armed = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to tell
                self.loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._armed = False
        while self._items:
            mailbox, output = self._items.popleft()
            mailbox.put(output)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as the API sees it. ``aliases``: other names that requests may use for it."""

    name: str
    tokenizer: Tokenizer
    chat: ChatTemplate
    eos_ids: tuple[int, ...]
    max_context_tokens: int
    default_max_tokens: int = 2048
    aliases: tuple[str, ...] = ()
    created: int = 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take, in seconds. ``head_s``: a stream's headers wait so long for admission, so that refusals
    keep their status; ``ping_s``: silence before a comment keeps the connection alive; ``stall_s``: a reader that takes
    nothing for so long is cut off; ``query_s``: for hints and session views."""

    head_s: float = 10.0
    ping_s: float = 15.0
    stall_s: float = 120.0
    query_s: float = 30.0


@dataclass(eq=False)
class Service:
    """``about``: versions and the kernel backend, for /health. ``on_close``: run once, after the loop has stopped.
    ``grammars``: what holds answers to a schema; None: nothing does."""

    loop: EngineLoop
    model: ServedModel
    config: ServerConfig
    about: Mapping[str, str] = field(default_factory=dict)
    on_close: Callable[[], None] | None = None
    grammars: Grammars | None = None
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        self.keys = KeyRing(self.config.api_keys)
        self.prompts = PromptBuilder(self.model.tokenizer, self.model.chat, self.config.prompt_memory_bytes)
        chat = self.model.chat
        self.traffic = Traffic()
        self.meters = Meters(self.loop, self._figures)
        self.responses = ResponseStore(self.config.stored_responses_bytes)
        self.format = tool_format([chat.source, chat.tool_source], self.config.tool_format)
        marks = (self.model.tokenizer.token_id(marker) for marker in self.format.markers)
        self.shown_ids = frozenset(mark for mark in marks if mark is not None) & self.model.tokenizer.special_ids
        self._pump: Pump | None = None
        self._tokenizing = anyio.CapacityLimiter(2)
        self._compiling = anyio.CapacityLimiter(1)

    def _figures(self) -> dict[str, float | dict[str, float]]:
        """What this side holds and has concluded, for the meters."""
        traffic = self.traffic
        return {
            "api_inferred_total": {name: float(count) for name, count in sorted(traffic.counts.items())},
            "api_prompt_tokens_total": {kind: float(n) for kind, n in sorted(traffic.prompt_tokens.items())},
            "api_cached_tokens_total": {kind: float(n) for kind, n in sorted(traffic.cached_tokens.items())},
            "api_sessions_tracked": float(traffic.sessions),
            "api_prompt_memory_bytes": float(self.prompts.memory.bytes + self.prompts.readings.bytes),
            "api_prompt_memory_hits_total": float(self.prompts.memory.hits),
            "api_stored_responses_bytes": float(self.responses.bytes),
        }

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stops the engine, then flushes and releases what it used. False if the engine did not end in time."""
        stopped = self.loop.stop(timeout_s)
        if self.on_close is not None:
            self.on_close()
            self.on_close = None
        return stopped

    def mailbox(self) -> Mailbox:
        """A mailbox on the running event loop."""
        return Mailbox(self._running_pump())

    @property
    def alarm(self) -> Alarm:
        """The running event loop's."""
        return self._running_pump().alarm

    def _running_pump(self) -> Pump:
        running = asyncio.get_running_loop()
        if self._pump is None or self._pump.loop is not running:
            self._pump = Pump(running)
        return self._pump

    async def off_loop(self, function: Callable[..., Result], *args: Any) -> Result:
        """Runs rendering and tokenizing beside the event loop, two at a time: both release no time to streams."""
        return await anyio.to_thread.run_sync(partial(function, *args), limiter=self._tokenizing)

    async def grammar(self, wanted: Constraint) -> Any:
        """The compiled grammar, made beside the event loop and beside rendering. Raises as ``compiled``."""
        return await anyio.to_thread.run_sync(compiled, self.grammars, wanted, limiter=self._compiling)

    def submit(self, turn: SubmitTurn, deliver: Deliver) -> None:
        """Queues a turn. Raises 429 when the inbox is full, 503 when the engine is gone."""
        _hand_in(lambda: self.loop.submit(turn, deliver))

    async def ask(self, event: HintBatch | QuerySessions) -> Output:
        """The engine's answer to a hint batch or a query. Raises 429 and 503 as ``submit``, 503 after ``query_s``."""
        mailbox = self.mailbox()
        _hand_in(lambda: self.loop.request(event, mailbox.deliver))
        outputs = await mailbox.take(self.patience.query_s)
        if not outputs or not self.loop.healthy:
            raise engine_unavailable("no answer from the engine")
        return outputs[0]

    def check_model(self, name: str) -> None:
        """404 for a model that is not served here, nor under a name that this server answers to."""
        if name == self.model.name or name in self.model.aliases:
            return
        if not any(fnmatchcase(name, pattern) for pattern in self.config.model_aliases):
            message = f"model: {name[:200]!r} is not served here; this server has {self.model.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def _hand_in(action: Callable[[], None]) -> None:
    try:
        action()
    except InboxFull as error:
        raise busy(f"server busy: {error}", "inbox_full") from None
    except EngineDead as error:
        raise engine_unavailable(str(error)) from None


def engine_unavailable(reason: str) -> ApiError:
    """503: the engine is gone or going."""
    return ApiError(503, f"engine unavailable: {reason}", code="engine_unavailable", headers={"retry-after": "5"})


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
