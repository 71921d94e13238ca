"""`/metrics` for Prometheus: what `asr_server.metrics` counts, and what is read off the server when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from asr_server import metrics as counted
from asr_server.api.openapi import metrics_responses
from asr_server.api.state import AppState, get_state
from asr_server.channel.messages import STEP_TIME_BOUNDS_S, StepTimes
from asr_server.checkpoint import revision_of
from asr_server.dispatch.supervisor import ReplicaState

router = APIRouter(tags=["operations"])


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses=metrics_responses())
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    registry = CollectorRegistry()
    registry.register(_StateCollector(get_state(request)))
    text = generate_latest(counted.REGISTRY) + generate_latest(registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class _StateCollector(Collector):
    def __init__(self, state: AppState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._realtime()
        yield from self._preprocessing()
        yield self._model()
        yield from self._replicas()

    def _model(self) -> Metric:
        """The device and the precision are known once the first replica is ready."""
        settings, engine = self._state.settings, self._state.dispatcher.engine
        served = {"model": settings.model_names[0], "revision": revision_of(Path(settings.model))}
        chosen = {"device": engine.device, "dtype": engine.dtype} if engine else {}
        return InfoMetricFamily("asr_model", "What is served.", value=served | chosen)

    def _requests(self) -> Iterator[Metric]:
        limiter = self._state.admission
        yield _gauge("asr_requests_in_flight", "Requests queued or transcribed.", limiter.num_in_flight)
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
        yield _counter("asr_chunk_bytes", "Samples handed on in chunks.", stats.chunk_bytes)

    def _replicas(self) -> Iterator[Metric]:
        """As of each replica's last heartbeat; the counters begin anew with a replaced replica."""
        states = {state.replica.name: state for state in self._state.dispatcher.replica_states}
        yield _gauge("asr_ready", "1 while a replica takes work.", float(self._state.dispatcher.ready))
        ready = GaugeMetricFamily("asr_replica_ready", "1 while it takes work.", labels=["replica"])
        for name in (f"replica {index}" for index in range(self._state.dispatcher.num_replicas)):
            ready.add_metric([name], float(name in states and states[name].ready))
        yield ready
        yield from _of_replicas(states)


def _of_replicas(states: Mapping[str, ReplicaState]) -> Iterator[Metric]:
    columns: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
        GaugeMetricFamily("asr_slots", "Chunks it can decode at once.", labels=["replica"]),
        GaugeMetricFamily("asr_slots_in_use", "Chunks it is decoding.", labels=["replica"]),
        CounterMetricFamily("asr_engine_steps", "Steps of the engine, idle ones too.", labels=["replica"]),
        CounterMetricFamily("asr_decode_steps", "Steps that decoded.", labels=["replica"]),
        CounterMetricFamily(
            "asr_decoded_tokens", "Tokens; by the decode steps: the mean batch.", labels=["replica"]
        ),
    )
    step_seconds = HistogramMetricFamily(
        "asr_engine_step_seconds", "Steps of the engine that had work.", labels=["replica"]
    )
    for name, state in states.items():
        beat = state.heartbeat
        values = (state.num_slots, beat.slots_in_use, beat.num_steps, beat.num_decode_steps)
        for column, value in zip(columns, (*values, beat.num_decoded_tokens), strict=True):
            column.add_metric([name], float(value))
        if beat.step_times.counts:
            step_seconds.add_metric([name], _buckets(beat.step_times), beat.step_times.sum_s)
    yield from columns
    yield step_seconds


def _buckets(times: StepTimes) -> list[tuple[str, float]]:
    """Prometheus counts in each bucket what is in the smaller ones too."""
    bounds = [*map(str, STEP_TIME_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(times.counts)), strict=True))


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)
