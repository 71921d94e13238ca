"""Send a span for each request and each of its stages to an OpenTelemetry collector.

Spans are made when the request ends. Imported only where the standard variables name a collector.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from asr_server import __version__
from asr_server.api.middleware import SAFE_METHODS
from asr_server.machine import in_daemon_thread
from asr_server.metrics import RequestStats
from asr_server.telemetry import current_request_id

CLOSE_LIMIT_S: Final = 2.0
SERVICE: Final = "asr-server"
_UNNAMED: Final = "unknown_service"  # the SDK's own name for a service without one
_NS_PER_S: Final = 1e9
_SERVER_ERROR: Final = 500


class Traces:
    """Sent as the variables OTEL_... say."""

    def __init__(self) -> None:
        resource = Resource.create({"service.version": __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith(_UNNAMED):
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("asr_server", __version__)
        self._clock_ns = time.time_ns() - time.monotonic_ns()
        self._spans: dict[RequestStats, Span] = {}
        self._propagator = TraceContextTextMapPropagator()

    def on_begun(self, scope: Scope, stats: RequestStats) -> None:
        if scope.get("method") in SAFE_METHODS:
            return
        parent = self._propagator.extract(Headers(scope=scope))
        own = {"asr.request_id": current_request_id.get()}
        span = self._tracer.start_span(scope["type"], parent, SpanKind.SERVER, attributes=own)
        if span.is_recording():
            self._spans[stats] = span
            stats.timeline = []
            stats.asked_for["trace_id"] = format_trace_id(span.get_span_context().trace_id)

    def on_ended(self, what: str, stats: RequestStats, figures: Mapping[str, Any]) -> None:
        span = self._spans.pop(stats, None)
        if span is None:
            return
        span.update_name(what)
        span.set_attributes(_attributes(figures))
        if figures.get("status", 0) >= _SERVER_ERROR:
            span.set_status(StatusCode.ERROR)
        context = set_span_in_context(span)
        for stage in stats.timeline or ():
            attributes = {} if stage.chunk is None else {"asr.chunk": stage.chunk}
            child = self._tracer.start_span(
                stage.name, context, start_time=self._ns(stage.began_at), attributes=attributes
            )
            child.end(self._ns(stage.ended_at))
        span.end()

    def _ns(self, time_s: float) -> int:
        return round(time_s * _NS_PER_S) + self._clock_ns

    def close(self) -> None:
        """Send the spans that are left, unless the collector takes too long."""
        with contextlib.suppress(TimeoutError):
            in_daemon_thread(self._provider.shutdown, "last traces").result(CLOSE_LIMIT_S)


_STANDARD_NAMES: Final = {
    "client": "client.address",
    "method": "http.request.method",
    "route": "http.route",
    "status": "http.response.status_code",
}


def _attributes(figures: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    return {
        _STANDARD_NAMES.get(name, f"asr.{name}"): value
        for name, value in figures.items()
        if isinstance(value, str | int | float | bool)
    }
