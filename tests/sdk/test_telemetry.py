"""Spans and metrics with a real OpenTelemetry SDK, and silence without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import tenuto
from tenuto.fake_server import FakeServer, VirtualClock

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@pytest.fixture(scope="module")
def providers() -> Iterator[tuple[InMemorySpanExporter, InMemoryMetricReader]]:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracer_provider, meter_provider = TracerProvider(), MeterProvider([reader])
    tracer_provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(tracer_provider)
    metrics.set_meter_provider(meter_provider)
    yield spans, reader
    tracer_provider.shutdown()
    meter_provider.shutdown()


def test_spans_and_metrics(twin: Any, server: FakeServer, providers: Any) -> None:
    spans, reader = providers
    spans.clear()
    clock = VirtualClock()
    server.reply("", ("bash", {"command": "make"}))

    async def scenario(tn: Any) -> None:
        async with twin.enter(tn.session("s", model="m", agent="coder")) as s:
            turn = await twin.wait(s.chat([tenuto.user("go")]))
            async with twin.enter(s.pause("tool", turn.tool_calls[0])):
                clock.advance(3.0)
            server.fail(400)
            with pytest.raises(tenuto.BadRequestError):
                await twin.wait(s.chat([tenuto.user("go")]))

    twin.run(scenario, server.url, clock=clock)
    by_name: dict[str, list[Any]] = {}
    for span in spans.get_finished_spans():
        by_name.setdefault(span.name, []).append(span)
    (session,), (tool,) = by_name["invoke_agent coder"], by_name["execute_tool bash"]
    good, bad = by_name["chat m"]
    assert {span.parent.span_id for span in (tool, good, bad)} == {session.context.span_id}
    assert good.attributes["gen_ai.usage.input_tokens"] > 0
    assert good.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert bad.attributes["error.type"] == "BadRequestError"
    assert tool.attributes["tenuto.pause.actual_s"] == pytest.approx(3.0)
    assert tool.attributes["gen_ai.conversation.id"] == "s"
    # The request carries the trace context of its chat span.
    _, trace_id, span_id, _ = server.chats[0].headers["traceparent"].split("-")
    assert (int(trace_id, 16), int(span_id, 16)) == (good.context.trace_id, good.context.span_id)
    found = {
        metric.name
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert {"tenuto.pause.duration", "tenuto.resume.ttft", "tenuto.tokens"} <= found


def test_silent_without_opentelemetry(server: FakeServer) -> None:
    """The package made unimportable: everything works and no header is added."""
    code = f"""
import sys
sys.modules["opentelemetry"] = None
import tenuto
with tenuto.connect_sync({server.url!r}) as tn, tn.session("s", model="m") as s:
    assert not tn.services.telemetry.active
    with s.pause("tool", command="make"):
        pass
    s.chat([tenuto.user("go")])
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    assert "traceparent" not in server.chats[0].headers
