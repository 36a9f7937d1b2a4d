"""One turn as the HTTP side sees it: handed to the engine, its tokens turned into an answer, its end understood.

``Generation`` owns the turn between submission and end; leaving its context early cancels the turn in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any
from urllib.parse import quote

from starlette.types import Receive

from tenuto.wire import CacheReport, Envelope, KvRelease, KvRetain, Tier
from tenuto_server.api.answer import Answer
from tenuto_server.api.errors import ApiError, bad_request, busy
from tenuto_server.api.job import Job
from tenuto_server.api.outline import Change, compare
from tenuto_server.api.output import OutputEvent, TextDelta
from tenuto_server.api.service import Service, engine_unavailable
from tenuto_server.api.text import AnswerText
from tenuto_server.engine.events import CancelTurn, HintBatch, PauseInferred, StopTurn, SubmitTurn
from tenuto_server.engine.plan import HintsDone, TokensOut, TurnDone, TurnRejected, TurnStarted
from tenuto_server.telemetry import log_event, start_span

logger = logging.getLogger(__name__)

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class Generation:
    """Async context manager around one turn.

    ``finish``: "stop" or "length" once the turn is over. ``stopped``: it was a stop string. ``answer``: what was said so
    far. ``report``: the best known cache report. ``session``: the name the engine gave or confirmed, known from admission
    on.
    """

    def __init__(self, service: Service, job: Job, receive: Receive) -> None:
        self._service, self._job = service, job
        self._mailbox = service.mailbox()
        self._receive = receive
        self._text = AnswerText(
            service.model.tokenizer, job.stops, service.shown_ids if job.parser is not None else frozenset()
        )
        self._ids: list[int] = []
        self.answer = Answer()
        self._began = job.arrived
        self._last_token: float | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._submitted = False
        self._grammar = 0
        self.created = int(time.time())
        self.report = CacheReport(session=job.turn.session, prompt_tokens=len(job.turn.tokens))
        self.session = job.turn.session
        self.admitted = False
        self.finish: str | None = None
        self.completion_tokens = 0
        self.ttft_s: float | None = None

    async def __aenter__(self) -> Generation:
        turn = await self._held()
        try:
            self._service.submit(turn, self._mailbox.deliver)
        except ApiError:
            self._let_go()
            raise
        self._submitted = True
        self._watcher = asyncio.create_task(self._watch())
        self._span = start_span("chat", {"gen_ai.request.model": self._service.model.name})
        return self

    async def _held(self) -> SubmitTurn:
        """The turn, with its answer held to a grammar where the job wants that. Raises 400 for a bad schema."""
        turn, wanted, grammars = self._job.turn, self._job.constraint, self._service.grammars
        grammar = None if wanted is None else await self._service.grammar(wanted)
        if grammar is None or grammars is None:
            return turn
        self._grammar = grammars.open(grammar)
        # A grammar ends with an end token: the engine must take it as one.
        stops = turn.sampling.stop_ids | frozenset(self._service.model.eos_ids)
        sampling = replace(turn.sampling, grammar=self._grammar, ignore_eos=False, stop_ids=stops)
        return replace(turn, sampling=sampling)

    def _let_go(self) -> None:
        if self._service.grammars is not None:
            self._service.grammars.close(self._grammar)

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._job.arrival is not None and self.session is not None and self.admitted:
            self._service.traffic.left(self._job.turn.tenant, self.session, self._job.arrival)
        self._let_go()
        if self.finish is None and self._submitted:
            self._service.loop.post(CancelTurn(self._job.turn.request_id))
        # Anything but a refusal (an ApiError) that ends a generation early is the client leaving.
        failed = kind is not None and issubclass(kind, ApiError)
        self._account(self.finish or ("error" if failed else "cancelled"))

    def _account(self, outcome: str) -> None:
        """Meters, one log line and the span's end."""
        seconds, report, turn = time.monotonic() - self._began, self.report, self._job.turn
        if self._job.arrival is not None and self.finish is not None:
            self._service.traffic.account(self._job.arrival, len(turn.tokens), report.cached_tokens)
        self._service.meters.request.labels(outcome).observe(seconds)
        log_event(
            logger,
            "turn",
            id=turn.request_id,
            tenant=turn.tenant,
            session=self.session,
            outcome=outcome,
            prompt=len(turn.tokens),
            cached=report.cached_tokens,
            generated=self.completion_tokens,
            ttft_s=self.ttft_s,
            seconds=seconds,
        )
        for name, value in (
            ("gen_ai.conversation.id", self.session),
            ("gen_ai.usage.input_tokens", len(turn.tokens)),
            ("gen_ai.usage.output_tokens", self.completion_tokens),
            ("gen_ai.usage.cache_read.input_tokens", report.cached_tokens),
            ("gen_ai.server.time_to_first_token", self.ttft_s),
            ("tenuto.outcome", outcome),
        ):
            if value is not None:
                self._span.set_attribute(name, value)
        self._span.end()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._mailbox.hang_up()

    async def next(self, timeout_s: float | None = None) -> list[OutputEvent] | None:
        """What was said since the last call, possibly nothing; None when ``timeout_s`` passed without news.

        Raises ``ClientGone``, or ``ApiError`` when the turn was rejected or failed.
        """
        outputs = await self._mailbox.take(timeout_s)
        if not outputs:
            return None
        events: list[OutputEvent] = []
        for output in outputs:
            match output:
                case TurnStarted():
                    self._on_started(output)
                case TokensOut():
                    events += self._parse(self._on_tokens(output))
                case TurnDone():
                    events += self._parse(await self._on_done(output), final=True)
                case TurnRejected():
                    self._submitted = False
                    raise rejected(output, self._job)
                case _:
                    raise AssertionError(f"unexpected output {type(output).__name__}")
        self.answer.take(events)
        if self.finish is not None:
            self._learn()
            await self._retain()
        return events

    def relay(self, to: Callable[[list[OutputEvent]], None], ready: Callable[[], bool]) -> None:
        """From now on what is said while ``next`` waits goes ``to`` there at once, when it is ``ready``, and ``next`` waits on:
        to wake a task for every token costs as much again as the token."""

        def take(output: TokensOut) -> bool:
            if not ready():
                return False
            events = self._parse(self._on_tokens(output))
            self.answer.take(events)
            if events:
                to(events)
            return True

        self._mailbox.relay = take

    async def rest(self) -> Answer:
        """The whole answer, once it is complete."""
        while self.finish is None:
            await self.next()
        return self.answer

    def _parse(self, text: str, final: bool = False) -> list[OutputEvent]:
        parser = self._job.parser
        if parser is None:
            return [TextDelta(text)] if text else []
        return parser.feed(text) + (parser.finish(self.finish == "length") if final else [])

    def _on_started(self, output: TurnStarted) -> None:
        if not self.admitted:
            self._service.meters.queue.observe(time.monotonic() - self._began)
            self._arrived(output.session)
        self.admitted, self.report = True, output.report.wire()

    def _arrived(self, session: str) -> None:
        """The engine has named the session: compares the request with the session's last one."""
        job, turn = self._job, self._job.turn
        if turn.side and job.arrival is not None:
            # A side call has no session of its own; it is shown with the one that it belongs to.
            self.session = job.arrival.identity.session
        else:
            self.session = session
        if job.arrival is not None:
            self._service.traffic.started(turn.tenant, session, turn.request_id, job.arrival)

    def _on_tokens(self, output: TokensOut) -> str:
        now, meters = time.monotonic(), self._service.meters
        if self._last_token is None:
            self.ttft_s = now - self._began
            meters.ttft.observe(self.ttft_s)
        else:
            meters.inter_token.observe((now - self._last_token) / max(1, len(output.tokens)))
        self._last_token = now
        if self._text.stopped:
            return ""
        self._ids += output.tokens
        text = self._text.push(output.tokens)
        if self._text.stopped:
            self._service.loop.post(StopTurn(self._job.turn.request_id, self._text.keep_tokens))
        return text

    async def _on_done(self, output: TurnDone) -> str:
        self._submitted = False
        self.report = output.report.wire()
        if output.reason == "error":
            detail = output.error or "the turn failed"
            if not self._service.loop.healthy:
                raise engine_unavailable(detail)
            raise ApiError(500, f"generation failed: {detail}", code="generation_failed")
        if output.reason == "cancelled":
            raise engine_unavailable(output.error or "the turn was cancelled")
        self.completion_tokens = output.completion_tokens
        tail = self._text.finish()
        self.finish = "stop" if self._text.stopped else output.reason
        divergence = output.report.divergence
        if divergence is not None and divergence.part is None and self._job.prompt.talk is not None:
            located = await self._service.off_loop(self._service.prompts.locate, self._job.prompt, divergence)
            self.report = self.report.model_copy(update={"divergence": located})
        return tail

    @property
    def stopped(self) -> bool:
        """The answer ended at a stop string."""
        return self._text.stopped

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stop_string

    def _learn(self) -> None:
        """What the answer's end teaches: how it will come back, and what the pause is that begins now."""
        job, turn = self._job, self._job.turn
        if job.talk is None or turn.warm:
            return
        if not self.stopped and self._ids:
            # Where a stop string was cut off, the text is not what these ids say.
            self._service.prompts.remember_answer(job.prompt, self.answer.message(), self._ids)
        if self.session is None or job.arrival is None:
            return
        cut = self.finish == "length"
        pause = self._service.traffic.answered(turn.tenant, self.session, job.arrival, self.answer, cut)
        if pause is not None:
            event = PauseInferred(turn.tenant, self.session, pause.kind, pause.tool, pause.program)
            self._service.loop.post(event)

    async def _retain(self) -> None:
        """Asks the engine for the life that the client wants its prefix to have in the pause that begins now."""
        job, turn = self._job, self._job.turn
        if (job.retain_s is None and not job.release) or self.session is None or turn.side or turn.warm:
            return
        released = job.release or job.retain_s is None
        action = (
            KvRelease(session=self.session) if released else KvRetain(session=self.session, duration_s=job.retain_s)
        )
        asked = Envelope.of([action])
        output = await self._service.ask(HintBatch(turn.request_id, turn.tenant, asked))
        assert isinstance(output, HintsDone)
        lease = output.receipts[0].lease
        receipts = (*self.report.receipts, *output.receipts)
        self.report = self.report.model_copy(update={"receipts": receipts} | ({"lease": lease} if lease else {}))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._job.turn.tokens)

    def reasoning_tokens(self) -> int:
        """Generated tokens that went into the reasoning, by its share of the answer's characters."""
        answer = self.answer
        spent = len(answer.reasoning)
        total = spent + len(answer.text) + sum(len(call.name) + len(call.arguments) for call in answer.calls)
        return round(self.completion_tokens * spent / total) if total else 0

    def inferred(self, what: str) -> bool:
        """Whether this was concluded from the session's traffic."""
        return self._job.arrival is not None and what in self._job.arrival.inferred

    def change_since(self, request_id: str) -> Change | None:
        """What changed from the request that was answered under this id. Raises ``KeyError`` if it is not known."""
        job = self._job
        before = self._service.traffic.outline_of(job.turn.tenant, request_id)
        if before is None or job.arrival is None:
            raise KeyError(request_id)
        return compare(before, job.arrival.outline)

    def usage(self) -> dict[str, Any]:
        """Usage in the OpenAI shape."""
        prompt = self.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.report.cached_tokens},
        }

    def tenuto(self) -> dict[str, Any]:
        """The ``tenuto`` object: the cache report, with what only this side knows filled in."""
        update: dict[str, Any] = {"receipts": (*self._job.receipts, *self.report.receipts)}
        if self.session is not None:
            update["session"] = self.session
        if self.ttft_s is not None:  # from the arrival of the request, which the engine cannot know
            update["ttft_s"] = self.ttft_s
        told = self.report.model_copy(update=update).model_dump(mode="json", exclude_none=True) | dict(self._job.notes)
        if (arrival := self._job.arrival) is not None:
            told["kind"] = arrival.kind
            if arrival.inferred:
                told["inferred"] = list(arrival.inferred)
            if arrival.change is not None:
                told["change"] = arrival.change.notes()
        return told

    def headers(self) -> dict[str, str]:
        """The same in headers, for clients that cannot read bodies: what is known at this moment."""
        return cache_headers(self.session, self.report if self.admitted else None)


def cache_headers(session: str | None, report: CacheReport | None) -> dict[str, str]:
    """``x-tenuto-*``: session (percent-encoded), cached tokens by tier, recomputed tokens by miss label."""
    headers: dict[str, str] = {}
    if session is not None:
        headers["x-tenuto-session"] = quote(session, safe="!#$&'()*+,/:;=?@[]~ ", errors="replace")
    if report is not None:
        headers["x-tenuto-cached-tokens"] = str(report.cached_tokens)
        headers |= {f"x-tenuto-cached-{tier}": str(report.cached.get(tier, 0)) for tier in _TIERS}
        headers |= {f"x-tenuto-recomputed-{label}": str(count) for label, count in report.recomputed.items() if count}
    return headers


def rejected(output: TurnRejected, job: Job) -> ApiError:
    """The engine's refusal in HTTP terms."""
    if output.code == "too_long":
        field = job.talk.source if job.talk is not None else "prompt"
        return bad_request(f"{field}: {output.message}", field, "context_length_exceeded")
    return busy(output.message, output.code, retry_after_s=5 if output.code == "too_many_sessions" else 1)
