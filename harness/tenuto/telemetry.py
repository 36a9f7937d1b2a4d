"""OpenTelemetry spans and metrics of sessions, turns and pauses. ``Telemetry`` owns its tracer and instruments.

Uses ``opentelemetry-api`` only, and only once the application has imported it or the environment names a provider: without
an SDK that somebody configures every call does nothing, and need not cost an import. Names follow the GenAI conventions (status: development) and live in one table,
because they still change. Nothing here raises into the agent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from tenuto.turn import Turn

NAMES = {
    "session": "invoke_agent",
    "chat": "chat",
    "tool": "execute_tool",
    "operation": "gen_ai.operation.name",
    "conversation": "gen_ai.conversation.id",
    "agent": "gen_ai.agent.name",
    "request_model": "gen_ai.request.model",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "input_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cache_read": "gen_ai.usage.cache_read.input_tokens",
    "tool_name": "gen_ai.tool.name",
    "error": "error.type",
    "pause_class": "tenuto.pause.class",
    "pause_predicted": "tenuto.pause.predicted_s",
    "pause_actual": "tenuto.pause.actual_s",
    "miss": "tenuto.miss.label",
    "tier": "tenuto.tier",
    "pause_duration": "tenuto.pause.duration",
    "resume_ttft": "tenuto.resume.ttft",
    "tokens": "tenuto.tokens",
}


PROVIDERS = ("OTEL_PYTHON_TRACER_PROVIDER", "OTEL_PYTHON_METER_PROVIDER")
"""Set in the environment, these have the API load a provider of that name by itself."""


class Telemetry:
    """Tracer and instruments of one client; a no-op while OpenTelemetry is not in use."""

    def __init__(self) -> None:
        self._tracer: Any = None
        self._pause: Any = None
        self._ttft: Any = None
        self._tokens: Any = None
        self._tried = False
        self._find()

    def _find(self) -> None:
        """Takes OpenTelemetry up as soon as it is in use."""
        if self._tried or not ("opentelemetry.trace" in sys.modules or any(name in os.environ for name in PROVIDERS)):
            return
        self._tried = True
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
            metrics = importlib.import_module("opentelemetry.metrics")
            self._tracer = self._trace.get_tracer("tenuto")
            meter = metrics.get_meter("tenuto")
            self._pause = meter.create_histogram(NAMES["pause_duration"], unit="s", description="Length of pauses")
            self._ttft = meter.create_histogram(NAMES["resume_ttft"], unit="s", description="Time to first token")
            self._tokens = meter.create_counter(NAMES["tokens"], unit="{token}", description="Prompt tokens by tier")
        except Exception:  # not installed, or another version: telemetry is optional
            self._tracer = None

    @property
    def active(self) -> bool:
        """Whether OpenTelemetry is in use."""
        return self._tracer is not None

    def start(self, what: str, name: str | None, attributes: Mapping[str, Any], parent: Any = None) -> Any:
        """Starts a span (``what``: session, chat or tool) below ``parent`` or the current span; None without telemetry."""
        self._find()
        if self._tracer is None:
            return None
        with contextlib.suppress(Exception):
            operation = NAMES[what]
            values = {NAMES[key]: value for key, value in attributes.items() if value is not None}
            title = f"{operation} {name}" if name else operation
            context = None if parent is None else self._trace.set_span_in_context(parent)
            return self._tracer.start_span(title, context, attributes={NAMES["operation"]: operation, **values})
        return None

    def finish(self, span: Any, attributes: Mapping[str, Any], error: BaseException | None = None) -> None:
        """Ends a span with its last attributes."""
        if span is None:
            return
        with contextlib.suppress(Exception):
            for key, value in attributes.items():
                if value is not None:
                    span.set_attribute(NAMES[key], value)
            if error is not None:
                span.set_attribute(NAMES["error"], type(error).__name__)
            span.end()

    def turn(self, span: Any, turn: Turn) -> None:
        """Ends a chat span with the turn's usage and records its metrics."""
        if self._tracer is None:
            return
        usage = turn.usage
        miss = usage.misses[0].label if usage.misses else None
        reasons = [turn.finish_reason] if turn.finish_reason else None
        self.finish(
            span,
            {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cache_read": usage.cached_tokens,
                "finish_reasons": reasons,
                "miss": miss,
            },
        )
        with contextlib.suppress(Exception):
            if turn.ttft_s is not None:
                self._ttft.record(turn.ttft_s)
            for tier, tokens in usage.by_tier.items():
                if tokens:
                    self._tokens.add(tokens, {NAMES["tier"]: tier})

    def recording(self, span: Any) -> bool:
        """Whether anybody will see what a span is told."""
        with contextlib.suppress(Exception):
            return span is not None and bool(span.is_recording())
        return False

    def pause(self, span: Any, kind: str, predicted_s: float | None, actual_s: float) -> None:
        """Ends a pause span and records its length."""
        if self._tracer is None:
            return
        self.finish(span, {"pause_class": kind, "pause_predicted": predicted_s, "pause_actual": actual_s})
        with contextlib.suppress(Exception):
            self._pause.record(actual_s, {NAMES["pause_class"]: kind})

    def headers(self, span: Any) -> dict[str, str]:
        """W3C ``traceparent`` for a request inside a span; empty without a recording span."""
        if span is None:
            return {}
        with contextlib.suppress(Exception):
            context = span.get_span_context()
            if context.is_valid:
                flags = int(context.trace_flags)
                return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"}
        return {}
