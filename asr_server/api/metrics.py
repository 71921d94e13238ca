"""`/metrics` for Prometheus: the counts that the server keeps anyway, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from asr_server.api.state import AppState, get_state

router = APIRouter(tags=["operations"])


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics")
async def metrics(request: Request) -> Response:
    registry = CollectorRegistry()
    registry.register(_StateCollector(get_state(request)))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _StateCollector(Collector):
    def __init__(self, state: AppState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._realtime()
        yield from self._preprocessing()
        yield from self._replicas()

    def _requests(self) -> Iterator[Metric]:
        limiter = self._state.admission
        yield _gauge("asr_requests_in_flight", "Requests read, queued or transcribed.", limiter.num_in_flight)
        yield _counter("asr_requests_rejected", "Requests told 429.", limiter.num_rejected)
        yield _gauge("asr_chunks", "Chunks waiting and in flight.", self._state.dispatcher.num_chunks)

    def _realtime(self) -> Iterator[Metric]:
        sessions = self._state.realtime
        yield _gauge("asr_realtime_sessions", "Realtime sessions open.", sessions.num_active)
        yield _counter("asr_realtime_sessions_started", "Realtime sessions begun.", sessions.num_started)
        yield _counter(
            "asr_realtime_sessions_rejected", "Realtime sessions closed 1013.", sessions.num_rejected
        )
        yield _counter("asr_realtime_turns", "Realtime turns completed or failed.", sessions.num_turns)

    def _preprocessing(self) -> Iterator[Metric]:
        pool, stats = self._state.pool, self._state.pool.stats
        yield _gauge("asr_preprocess_workers", "Threads that decode and split audio.", pool.num_workers)
        yield _gauge("asr_preprocess_queue_depth", "Slices waiting for a thread.", stats.queued)
        yield _gauge("asr_preprocess_busy", "Threads at work.", stats.busy)
        yield _gauge("asr_preprocess_held_bytes", "Samples decoded, not yet in a chunk.", pool.held_bytes)
        yield _counter("asr_preprocess_slices", "Slices decoded.", stats.slices)
        yield _counter("asr_preprocess_cancelled", "Slices whose client had left.", stats.cancelled)
        yield _counter("asr_preprocess_wait_seconds", "Time slices have waited for a thread.", stats.wait_s)
        yield _counter("asr_preprocess_seconds", "Time threads have worked.", stats.decode_s)
        yield _counter("asr_audio_decoded_seconds", "Audio decoded.", stats.audio_s)
        yield _counter("asr_chunk_bytes", "Samples handed on in chunks.", stats.chunk_bytes)

    def _replicas(self) -> Iterator[Metric]:
        """As of each replica's last heartbeat; the counters begin anew with a replaced replica."""
        columns: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
            GaugeMetricFamily("asr_replica_ready", "1 once it takes work.", labels=["replica"]),
            GaugeMetricFamily("asr_slots", "Chunks it can decode at once.", labels=["replica"]),
            GaugeMetricFamily("asr_slots_in_use", "Chunks it is decoding.", labels=["replica"]),
            CounterMetricFamily("asr_engine_steps", "Steps of the engine.", labels=["replica"]),
            CounterMetricFamily("asr_decode_steps", "Steps that decoded.", labels=["replica"]),
            CounterMetricFamily(
                "asr_decoded_tokens", "Tokens; by the decode steps: the mean batch.", labels=["replica"]
            ),
        )
        for replica in self._state.dispatcher.replica_states:
            beat = replica.heartbeat
            values = (
                replica.ready,
                replica.num_slots,
                beat.slots_in_use,
                beat.num_steps,
                beat.num_decode_steps,
            )
            for column, value in zip(columns, (*values, beat.num_decoded_tokens), strict=True):
                column.add_metric([replica.replica.name], float(value))
        yield from columns


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)
