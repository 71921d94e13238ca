"""Spans as a collector gets them from a real server, and none where none are asked for."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from tests.conftest import WITHOUT_ENGINE, Server, run_server
from tests.support.speech import say
from tests.unit.api.sample_files import sound_file

pytest.importorskip("opentelemetry.sdk", reason="the extra 'traces' is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATH = "/v1/audio/transcriptions"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE_ID}-{PARENT_ID}-{flags}" for flags in ("01", "00"))
STAGES = {"upload", "transcription", "decode_audio", "queue", "encode", "decode_text", "render"}
ENOUGH_S = 30.0


class Collector(ThreadingHTTPServer):
    """Takes what an exporter sends by OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.has_more = threading.Condition()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self.has_more:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                self.services.add(names["service.name"])
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self.has_more.notify_all()

    def trace_of(self, request_id: str) -> tuple[Any, list[Any]]:
        """Wait for a request's span. Return it and those below it."""

        def found() -> list[Any]:
            return [span for span in self.spans if attributes(span).get("asr.request_id") == request_id]

        with self.has_more:
            assert self.has_more.wait_for(found, ENOUGH_S), [span.name for span in self.spans]
            (root,) = found()
            return root, [span for span in self.spans if span.parent_span_id == root.span_id]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path == "/v1/traces":
            self.server.take(body)
        reply = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector) -> Iterator[Server]:
    with run_server(
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    ) as server:
        yield server


def ask(server: Server, request_id: str, file: bytes | None = None, **fields: str) -> httpx.Response:
    headers = {"x-request-id": request_id} | {
        name: fields.pop(name) for name in ("traceparent",) if name in fields
    }
    file = sound_file(say("314").samples) if file is None else file
    return httpx.post(server.url + PATH, files={"file": file}, data=fields, headers=headers, timeout=60)


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_request_is_a_span_with_its_stages_within_it(traced: Server, collector: Collector) -> None:
    assert ask(traced, "whole").status_code == 200
    root, stages = collector.trace_of("whole")
    assert root.name == f"POST {PATH}"
    assert not root.parent_span_id
    told = attributes(root)
    assert (told["http.request.method"], told["http.route"], told["http.response.status_code"]) == (
        "POST",
        PATH,
        200,
    )
    assert told["asr.audio_s"] == pytest.approx(len(say("314").samples) / 16_000, abs=0.01)
    assert {stage.name for stage in stages} == STAGES | {"reply"}
    assert collector.services == {"asr-server"}
    for stage in stages:
        assert stage.trace_id == root.trace_id
        assert root.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        assert stage.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
    ends = {stage.name: stage.end_time_unix_nano for stage in stages}
    assert ends["upload"] <= ends["queue"] <= ends["encode"] <= ends["decode_text"] <= ends["reply"]


def test_the_clients_trace_goes_on_and_the_log_names_it(traced: Server, collector: Collector) -> None:
    ask(traced, "streamed", stream="true", traceparent=SAMPLED)
    root, stages = collector.trace_of("streamed")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert attributes(root)["asr.trace_id"] == TRACE_ID
    assert {stage.name for stage in stages} == STAGES


def test_unsampled_and_asking_requests_are_not_traced(traced: Server, collector: Collector) -> None:
    ask(traced, "unsampled", traceparent=UNSAMPLED)
    httpx.get(traced.url + "/v1/models", headers={"x-request-id": "a-get"})
    ask(traced, "refused", b"no audio")
    root, _ = collector.trace_of("refused")  # sent after the others
    assert attributes(root)["http.response.status_code"] == 400
    told = {attributes(span).get("asr.request_id") for span in collector.spans}
    assert told.isdisjoint({"unsampled", "a-get"})


def test_the_last_spans_are_sent_before_a_server_ends_and_its_service_has_the_name_given() -> None:
    with collecting() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "ears"}
        with run_server(*WITHOUT_ENGINE, **environment) as server:
            ask(server, "last", b"no audio")
        assert server.process.returncode == 0
        collector.trace_of("last")
        assert collector.services == {"ears"}


def test_a_collector_that_is_away_delays_no_request_and_no_stop() -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_BSP_SCHEDULE_DELAY": "50"}
    with run_server(*WITHOUT_ENGINE, **environment) as server:
        assert ask(server, "alone", b"no audio").status_code == 400
        assert "Traceback" not in server.written()
    assert server.process.returncode == 0
