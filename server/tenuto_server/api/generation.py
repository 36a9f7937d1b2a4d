"""One turn as the HTTP side sees it: handed to the engine, its tokens turned into text, its end understood.

``Generation`` owns the turn between submission and end; leaving its context early cancels the turn in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Receive

from tenuto.wire import CacheReport, Receipt, Tier
from tenuto_server.api.carriers import Riders
from tenuto_server.api.errors import ApiError, bad_request, busy
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.schema import GenerationRequest
from tenuto_server.api.service import Service, engine_unavailable
from tenuto_server.api.text import AnswerText, find_tool_call
from tenuto_server.engine.events import CancelTurn, PauseInferred, StopTurn, SubmitTurn
from tenuto_server.engine.plan import TokensOut, TurnDone, TurnRejected, TurnStarted
from tenuto_server.telemetry import log_event, start_span

logger = logging.getLogger(__name__)

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A turn ready to be submitted, and what its answer needs. ``arrived``: when its request did (monotonic seconds)."""

    turn: SubmitTurn
    prompt: Prompt
    stops: tuple[str, ...] = ()
    tools: bool = False
    receipts: tuple[Receipt, ...] = ()
    arrived: float = 0.0


def make_job(
    service: Service,
    http: Request,
    kind: str,
    tenant: str,
    request: GenerationRequest,
    prompt: Prompt,
    riders: Riders,
    tools: bool,
) -> Job:
    """A job whose id is ``kind`` and the request's own id. Raises 400 for a prompt that is empty or leaves no room to
    answer."""
    have, room = len(prompt.tokens), service.model.max_context_tokens
    if have == 0:
        raise bad_request("prompt: has no tokens; give at least one", "prompt")
    if have >= room:
        message = (
            f"this model's context is {room} tokens, of which at least one is for the answer; the prompt has {have}"
        )
        field = "messages" if prompt.messages else "prompt"
        raise bad_request(f"{field}: {message}", field, "context_length_exceeded")
    # More than fits is not an error: agents send one constant for all models.
    limit = request.limit() or service.model.default_max_tokens
    sampling = request.sampling(min(limit, room - have), service.model.eos_ids)
    turn = SubmitTurn(
        request_id=http.scope["request_id"].replace("req_", f"{kind}-"),
        tenant=tenant,
        tokens=prompt.tokens,
        sampling=sampling,
        session=riders.identity.session,
        parent=riders.identity.parent,
        salt=riders.salt,
        last_role=prompt.last_role,
        hints=riders.hints,
        final=riders.identity.final,
    )
    return Job(turn, prompt, request.stops(), tools, riders.receipts, http.scope["arrived"])


class Generation:
    """Async context manager around one turn.

    ``finish``: "stop" or "length" once the turn is over. ``report``: the best known cache report. ``session``: the name
    the engine gave or confirmed, known from admission on.
    """

    def __init__(self, service: Service, job: Job, receive: Receive) -> None:
        self._service, self._job = service, job
        self._mailbox = service.mailbox()
        self._receive = receive
        self._answer = AnswerText(service.model.tokenizer, job.stops, service.marker_ids)
        self._kept: list[str] = []  # the text, where a tool call may have to be read out of it
        self._began = job.arrived
        self._last_token: float | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._submitted = False
        self.created = int(time.time())
        self.report = CacheReport(session=job.turn.session, prompt_tokens=len(job.turn.tokens))
        self.session = job.turn.session
        self.admitted = False
        self.finish: str | None = None
        self.completion_tokens = 0
        self.ttft_s: float | None = None

    async def __aenter__(self) -> Generation:
        self._service.submit(self._job.turn, self._mailbox.deliver)
        self._submitted = True
        self._watcher = asyncio.create_task(self._watch())
        self._span = start_span("chat", {"gen_ai.request.model": self._service.model.name})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        if self.finish is None and self._submitted:
            self._service.loop.post(CancelTurn(self._job.turn.request_id))
        # Anything but a refusal (an ApiError) that ends a generation early is the client leaving.
        failed = kind is not None and issubclass(kind, ApiError)
        self._account(self.finish or ("error" if failed else "cancelled"))

    def _account(self, outcome: str) -> None:
        """Meters, one log line and the span's end."""
        seconds, report, turn = time.monotonic() - self._began, self.report, self._job.turn
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

    async def next(self, timeout_s: float | None = None) -> str | None:
        """Text since the last call, possibly empty; None when ``timeout_s`` passed without news.

        Raises ``ClientGone``, or ``ApiError`` when the turn was rejected or failed.
        """
        outputs = await self._mailbox.take(timeout_s)
        if not outputs:
            return None
        pieces: list[str] = []
        for output in outputs:
            match output:
                case TurnStarted():
                    self._on_started(output)
                case TokensOut():
                    pieces.append(self._on_tokens(output))
                case TurnDone():
                    pieces.append(await self._on_done(output))
                case TurnRejected():
                    self._submitted = False
                    raise rejected(output)
                case _:
                    raise AssertionError(f"unexpected output {type(output).__name__}")
        text = "".join(pieces)
        if self._job.tools:
            self._kept.append(text)
            if self.finish is not None:
                self._infer_pause()
        return text

    async def all_text(self) -> str:
        """The whole answer."""
        pieces = []
        while self.finish is None:
            pieces.append(await self.next() or "")
        return "".join(pieces)

    def _on_started(self, output: TurnStarted) -> None:
        if not self.admitted:
            self._service.meters.queue.observe(time.monotonic() - self._began)
        self.admitted, self.session, self.report = True, output.session, output.report

    def _on_tokens(self, output: TokensOut) -> str:
        now, meters = time.monotonic(), self._service.meters
        if self._last_token is None:
            self.ttft_s = now - self._began
            meters.ttft.observe(self.ttft_s)
        else:
            meters.inter_token.observe((now - self._last_token) / max(1, len(output.tokens)))
        self._last_token = now
        if self._answer.stopped:
            return ""
        text = self._answer.push(output.tokens)
        if self._answer.stopped:
            self._service.loop.post(StopTurn(self._job.turn.request_id, self._answer.keep_tokens))
        return text

    async def _on_done(self, output: TurnDone) -> str:
        self._submitted = False
        self.report = output.report
        if output.reason == "error":
            detail = output.error or "the turn failed"
            if not self._service.loop.healthy:
                raise engine_unavailable(detail)
            raise ApiError(500, f"generation failed: {detail}", code="generation_failed")
        if output.reason == "cancelled":
            raise engine_unavailable(output.error or "the turn was cancelled")
        self.completion_tokens = output.completion_tokens
        tail = self._answer.finish()
        self.finish = "stop" if self._answer.stopped else output.reason
        divergence = output.report.divergence
        if divergence is not None and divergence.part is None and self._job.prompt.messages:
            located = await self._service.off_loop(self._service.prompts.locate, self._job.prompt, divergence)
            self.report = self.report.model_copy(update={"divergence": located})
        return tail

    def _infer_pause(self) -> None:
        """Tells the engine what this answer's end says about the pause that begins now."""
        seen = find_tool_call("".join(self._kept), self._answer.marker_at)
        self._kept.clear()
        if seen is not None and self.session is not None:
            tenant = self._job.turn.tenant
            self._service.loop.post(PauseInferred(tenant, self.session, "tool", seen.tool, seen.program))

    def usage(self) -> dict[str, Any]:
        """Usage in the OpenAI shape."""
        prompt = len(self._job.turn.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.report.cached_tokens},
        }

    def tenuto(self) -> dict[str, Any]:
        """The ``tenuto`` object: the cache report, with what only this side knows filled in."""
        update: dict[str, Any] = {"receipts": (*self._job.receipts, *self.report.receipts)}
        if self.report.session is None:
            update["session"] = self.session
        if self.ttft_s is not None:  # from the arrival of the request, which the engine cannot know
            update["ttft_s"] = self.ttft_s
        return self.report.model_copy(update=update).model_dump(mode="json", exclude_none=True)

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


def rejected(output: TurnRejected) -> ApiError:
    """The engine's refusal in HTTP terms."""
    if output.code == "too_long":
        return bad_request(output.message, "messages", "context_length_exceeded")
    return busy(output.message, output.code, retry_after_s=5 if output.code == "too_many_sessions" else 1)
