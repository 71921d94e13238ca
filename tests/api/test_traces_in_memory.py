"""The spans of a request, kept by an exporter of the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asr_server.metrics import begin_request_stats
from asr_server.telemetry import current_request_id

pytest.importorskip("opentelemetry.sdk", reason="the extra 'traces' is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from asr_server.api import traces as module
from asr_server.api.traces import Traces

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def kept() -> Iterator[tuple[Traces, InMemorySpanExporter]]:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield Traces(provider), exporter
    provider.shutdown()


def scope_of(**headers: str) -> dict[str, Any]:
    return {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


@pytest.mark.parametrize(
    ("status", "code"), [(200, StatusCode.UNSET), (499, StatusCode.UNSET), (500, StatusCode.ERROR)]
)
def test_a_request_is_a_span_with_its_figures_and_stages(
    kept: tuple[Traces, InMemorySpanExporter], status: int, code: StatusCode
) -> None:
    traces, exporter = kept
    current_request_id.set("mine")
    stats = begin_request_stats(lambda: "/")
    assert stats.timeline is None
    before_ns = time.time_ns()
    trace = traces.begin(scope_of(), stats)
    assert trace is not None
    now = time.monotonic()
    stats.note("decode_audio", now, now + 0.25)
    stats.note("queue", now + 0.25, now + 0.5, chunk=0)
    figures = {"route": "/v1", "status": status, "seconds": 0.5, "stream": True, "stages_s": {"upload": 1.0}}
    trace.end("POST /v1", figures | {"client": "10.0.0.1", "method": "POST"})
    decoding, queueing, request = exporter.get_finished_spans()
    assert (request.name, request.kind, request.status.status_code) == ("POST /v1", SpanKind.SERVER, code)
    assert request.attributes == {
        "asr.request_id": "mine",
        "http.route": "/v1",
        "http.response.status_code": status,
        "asr.seconds": 0.5,
        "asr.stream": True,
        "client.address": "10.0.0.1",
        "http.request.method": "POST",
    }
    assert (decoding.name, decoding.attributes) == ("decode_audio", {})
    assert (queueing.name, queueing.attributes) == ("queue", {"asr.chunk": 0})
    assert request.context
    assert {span.parent.span_id for span in (decoding, queueing) if span.parent} == {request.context.span_id}
    assert decoding.start_time
    assert decoding.end_time
    assert decoding.end_time - decoding.start_time == pytest.approx(250_000_000, abs=1000)
    assert queueing.start_time == pytest.approx(decoding.end_time, abs=1000)
    assert before_ns - 10**9 < decoding.start_time < time.time_ns() + 10**9


def test_a_figure_without_a_status_is_no_error(kept: tuple[Traces, InMemorySpanExporter]) -> None:
    traces, exporter = kept
    stats = begin_request_stats(lambda: "/")
    trace = traces.begin({"type": "websocket", "headers": []}, stats)
    assert trace is not None
    trace.end("WebSocket /v1/realtime", {"close_code": 1000})
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(("flags", "is_traced"), [("01", True), ("00", False)])
def test_the_clients_trace_goes_on_if_it_is_sampled(
    kept: tuple[Traces, InMemorySpanExporter], flags: str, is_traced: bool
) -> None:
    traces, exporter = kept
    stats = begin_request_stats(lambda: "/")
    trace = traces.begin(scope_of(traceparent=f"00-{TRACE_ID}-{PARENT_ID}-{flags}"), stats)
    assert (trace is not None) == is_traced
    assert stats.asked_for == ({"trace_id": TRACE_ID} if is_traced else {})
    assert (stats.timeline == []) == is_traced
    if trace is not None:
        trace.end("POST /", {})
        assert exporter.get_finished_spans()[0].parent.span_id == int(PARENT_ID, 16)  # type: ignore[union-attr]


def test_the_end_waits_for_the_last_spans_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_LIMIT_S", 0.01)
    never, was_shut_down = threading.Event(), threading.Event()
    provider = TracerProvider()
    monkeypatch.setattr(provider, "shutdown", was_shut_down.set)
    Traces(provider).close()
    assert was_shut_down.wait(60)
    monkeypatch.setattr(provider, "shutdown", never.wait)
    Traces(provider).close()
    never.set()


@pytest.mark.parametrize(("given", "name"), [({}, "asr-server"), ({"OTEL_SERVICE_NAME": "own"}, "own")])
def test_the_service_has_our_name_unless_another_is_given(
    given: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    traces = Traces.to_collector()
    assert traces._provider.resource.attributes["service.name"] == name
    traces._provider.shutdown()
