"""`/metrics` for Prometheus: what the rooms count anyway, read when asked."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from asr_server.api.rooms import Rooms, rooms_of

router = APIRouter(tags=["operations"])


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    registry = CollectorRegistry()
    registry.register(_Rooms(rooms_of(request)))
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})


class _Rooms(Collector):
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._preprocessing()
        yield from self._replicas()

    def _requests(self) -> Iterator[Metric]:
        room = self._rooms.waiting_room
        yield _gauge("asr_requests_inside", "Requests being read, queued or transcribed.", room.num_inside)
        yield _counter("asr_requests_refused", "Requests told 429.", room.num_refused)
        yield _gauge("asr_chunks", "Chunks waiting and in flight.", self._rooms.dispatcher.num_chunks)

    def _preprocessing(self) -> Iterator[Metric]:
        pool, stats = self._rooms.pool, self._rooms.pool.stats
        yield _gauge("asr_preprocess_workers", "Threads that decode and split audio.", pool.num_workers)
        yield _gauge("asr_preprocess_queue_depth", "Turns waiting for a thread.", stats.queued)
        yield _gauge("asr_preprocess_busy", "Threads at work.", stats.busy)
        yield _gauge("asr_preprocess_held_bytes", "Samples decoded, not yet in a chunk.", pool.held_bytes)
        yield _counter("asr_preprocess_turns", "Turns done.", stats.turns)
        yield _counter("asr_preprocess_cancelled", "Turns whose client had left.", stats.cancelled)
        yield _counter("asr_preprocess_wait_seconds", "Time turns have waited for a thread.", stats.wait_s)
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
        for link in self._rooms.dispatcher.links:
            beat = link.heartbeat
            values = (link.ready, link.num_slots, beat.slots_in_use, beat.num_steps, beat.num_decode_steps)
            for column, value in zip(columns, (*values, beat.num_decoded_tokens), strict=True):
                column.add_metric([link.replica.name], float(value))
        yield from columns


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=value)
