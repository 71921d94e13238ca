"""`/metrics`, on a port of its own if asked: the state, its processes by /proc, and the core's counters."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import uvicorn
from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp

from asr_server import metrics as counted
from asr_server.annexes.monitoring import MonitoringSettings
from asr_server.api.models import ServedModel
from asr_server.api.openapi import metrics_responses
from asr_server.api.state import AppState, Keys, get_state
from asr_server.audio.ffmpeg_client import decode_processes
from asr_server.checkpoint.files import revision_of
from asr_server.config import Settings
from asr_server.machine import in_url, sockets_for
from asr_server.protocols.tls import server_config
from asr_server.telemetry import announce
from asr_server.transport.messages import STEP_TIME_BOUNDS_S, StepTimes

router = APIRouter(tags=["operations"])


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=Response, responses=metrics_responses())
async def metrics(request: Request) -> Response:
    """Return metrics for Prometheus."""
    state = get_state(request)
    usages = await usages_of(state)
    text = generate_latest(counted.REGISTRY) + generate_latest(_StateCollector(state, usages))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


_LABELS: Final = ("model", "replica")
_gauge, _counter = GaugeMetricFamily, CounterMetricFamily
_replica_gauge, _replica_counter = partial(_gauge, labels=_LABELS), partial(_counter, labels=_LABELS)


class _StateCollector(Collector):
    def __init__(self, state: AppState, usages: Mapping[Labels, Usage]) -> None:
        self._state = state
        self._usages = usages

    def collect(self) -> Iterator[Metric]:
        yield from _of_server(self._state)
        yield from _of_keys(self._state.api_keys)
        yield from _of_models(list(self._state.models))
        yield from _of_processes(self._usages)


def _of_server(state: AppState) -> Iterator[Metric]:
    limiter = state.admission
    yield _gauge("asr_request_places", "Requests that can be in flight at once.", limiter.num_places)
    yield _gauge("asr_requests_in_flight", "Requests that hold a place.", limiter.num_in_flight)
    yield _gauge("asr_requests_waiting", "Uploaded requests in line for a place.", limiter.num_waiting)
    meaning = "Requests refused with 429 for want of a place."
    yield _counter("asr_requests_rejected", meaning, limiter.num_rejected)
    sessions = state.realtime
    yield _gauge("asr_realtime_sessions", "Realtime sessions open.", sessions.num_active)
    yield _counter("asr_realtime_sessions_started", "Realtime sessions begun.", sessions.num_started)
    meaning = "Realtime sessions refused with 503."
    yield _counter("asr_realtime_sessions_rejected", meaning, sessions.num_rejected)
    yield _counter("asr_realtime_turns", "Realtime turns completed or failed.", sessions.num_turns)
    pool, stats = state.pool, state.pool.stats
    yield _gauge("asr_preprocess_workers", "Threads that decode and split audio.", pool.num_workers)
    yield _gauge("asr_preprocess_queue_depth", "Tasks waiting for a thread.", stats.queued)
    yield _gauge("asr_preprocess_busy", "Threads at work.", stats.busy)
    yield _gauge("asr_preprocess_held_bytes", "Samples decoded, not yet in a chunk.", pool.held_bytes)
    yield _counter("asr_preprocess_slices", "Slices decoded.", stats.slices)
    meaning = "Slices dropped because their client had left."
    yield _counter("asr_preprocess_cancelled", meaning, stats.cancelled)
    yield _counter("asr_chunk_bytes", "Samples handed on in chunks.", stats.chunk_bytes)


def _of_keys(keys: Keys) -> Iterator[Metric]:
    meaning = "Requests and sessions of each key with a name."
    requests = _counter("asr_key_requests", meaning, labels=("key", "status"))
    meaning = "Audio with final text of each key with a name."
    audio = _counter("asr_key_audio_seconds", meaning, labels=("key",))
    for account in keys.accounts:
        audio.add_metric([account.name], account.audio_s)
        for status, count in account.answers.items():
            requests.add_metric([account.name, str(status)], count)
    meaning = "1 while the file of keys is broken or gone, and its last keys are taken."
    yield from (requests, audio, _gauge("asr_keys_file_stale", meaning, keys.is_stale))


def _of_models(models: list[ServedModel]) -> Iterator[Metric]:
    served = InfoMetricFamily("asr_model", "What is served.", labels=["model"])
    ready = GaugeMetricFamily("asr_ready", "1 while the model takes requests.", labels=["model"])
    loaded = GaugeMetricFamily("asr_model_loaded", "1 while its replicas run or start.", labels=["model"])
    chunks = GaugeMetricFamily("asr_chunks", "Chunks waiting and in flight.", labels=["model"])
    waiting = GaugeMetricFamily("asr_chunks_waiting", "Chunks that no replica has.", labels=["model"])
    for model in models:
        served.add_metric([model.name], _description(model))
        ready.add_metric([model.name], float(model.takes_requests))
        loaded.add_metric([model.name], float(model.state != "unloaded"))
        chunks.add_metric([model.name], model.dispatcher.num_chunks)
        waiting.add_metric([model.name], model.dispatcher.num_waiting)
    yield from (served, ready, loaded, chunks, waiting)
    yield from _of_replicas(models)


def _description(model: ServedModel) -> dict[str, str]:
    engine = model.dispatcher.engine
    chosen = {"device": engine.device, "dtype": engine.dtype} if engine else {}
    return {"revision": revision_of(Path(model.settings.model))} | chosen


def _of_replicas(models: list[ServedModel]) -> Iterator[Metric]:
    ready = _replica_gauge("asr_replica_ready", "1 while it takes work.")
    columns: tuple[GaugeMetricFamily | CounterMetricFamily, ...] = (
        _replica_gauge("asr_chunks_in_flight", "Chunks it has and did not answer."),
        _replica_gauge("asr_slots", "Chunks it can decode at once."),
        _replica_gauge("asr_slots_in_use", "Chunks it is decoding."),
        _replica_counter("asr_engine_steps", "Steps of the engine, idle ones too."),
        _replica_counter("asr_decode_steps", "Steps that decoded."),
        _replica_counter("asr_decoded_tokens", "Tokens; by the decode steps: the mean batch."),
        _replica_counter("asr_search_steps", "Steps of each chunk in a beam search."),
        _replica_counter("asr_search_steps_sure", "Those with no other token close."),
        _replica_counter("asr_search_steps_wide", "Those with several hypotheses."),
    )
    meaning = "Steps of the engine that had work."
    step_seconds = HistogramMetricFamily("asr_engine_step_seconds", meaning, labels=_LABELS)
    for model in models:
        supervisor = model.dispatcher.supervisor
        states = {state.replica.name: state for state in supervisor.replica_states}
        for name in (f"replica {index}" for index in range(supervisor.num_replicas)):
            ready.add_metric([model.name, name], float(name in states and states[name].ready))
        for name, state in states.items():
            labels, beat = [model.name, name], state.heartbeat
            chunks = (len(state.in_flight), state.num_slots, beat.slots_in_use)
            steps = (beat.num_steps, beat.num_decode_steps, beat.num_decoded_tokens)
            for column, value in zip(columns, (*chunks, *steps, *beat.search_steps), strict=True):
                column.add_metric(labels, float(value))
            if beat.step_times.counts:
                step_seconds.add_metric(labels, cumulative_buckets(beat.step_times), beat.step_times.sum_s)
    yield ready
    yield from columns
    yield step_seconds


def _of_processes(usages: Mapping[Labels, Usage]) -> Iterator[Metric]:
    memory = _replica_gauge("asr_replica_resident_memory_bytes", "Memory of its processes on this machine.")
    cpu = _replica_counter("asr_replica_cpu_seconds", "Processor time of its processes on this machine.")
    for labels, usage in usages.items():
        if labels != DECODING:
            memory.add_metric(labels, usage.resident_bytes)
            cpu.add_metric(labels, usage.cpu_s)
    yield from (memory, cpu)
    if decoding := usages.get(DECODING):
        yield _gauge("asr_decode_processes", "Processes of FFmpeg.", decoding.num_processes)
        meaning = "Memory of FFmpeg's processes."
        yield _gauge("asr_decode_resident_memory_bytes", meaning, decoding.resident_bytes)
        yield _counter("asr_decode_cpu_seconds", "Processor time of FFmpeg's processes.", decoding.cpu_s)


def cumulative_buckets(times: StepTimes) -> list[tuple[str, float]]:
    """Add to each bucket all smaller ones, as Prometheus expects."""
    bounds = [*map(str, STEP_TIME_BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(times.counts)), strict=True))


_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat behind the command's name, from 0.
_OWN_AND_CHILDRENS_TICKS: Final = slice(11, 15)
_CHILDRENS_TICKS: Final = slice(13, 15)  # of those that have ended
_RESIDENT_PAGES: Final = 21
_MAX_TRIES: Final = 3

STATM: Final = Path("/proc/self/statm")
Labels = tuple[str, str]  # of a replica: its model's name and its own
DECODING: Final = ("", "")  # in their place


class Usage(NamedTuple):
    num_processes: int
    resident_bytes: int  # pages that processes share count for each
    cpu_s: float  # ended children included, so that it never falls


def usage_of(pid: int) -> Usage | None:
    """Sum up a process and its children; None if it has ended or cannot be read. Blocks."""
    try:
        for _ in range(_MAX_TRIES):
            own = _stat(pid)
            processes = [own, *_children(pid)]
            if _stat(pid)[_CHILDRENS_TICKS] == own[_CHILDRENS_TICKS]:  # else one ended meanwhile
                break
    except OSError:
        return None
    ticks = sum(int(field) for stat in processes for field in stat[_OWN_AND_CHILDRENS_TICKS])
    pages = sum(int(stat[_RESIDENT_PAGES]) for stat in processes)
    return Usage(len(processes), pages * _PAGE_BYTES, ticks / _TICKS_PER_S)


async def usages_of(state: AppState) -> dict[Labels, Usage]:
    pids = {
        (model.name, replica_state.replica.name): replica_state.replica.pid
        for model in state.models
        for replica_state in model.dispatcher.supervisor.replica_states
    }
    pids[DECODING] = decode_processes.forkserver_pid
    known = {labels: pid for labels, pid in pids.items() if pid is not None}
    usages = await asyncio.to_thread(lambda: {labels: usage_of(pid) for labels, pid in known.items()})
    return {labels: usage for labels, usage in usages.items() if usage}


def resident_bytes() -> int:
    """Return this process's memory; 0 without /proc."""
    return int(STATM.read_text().split()[1]) * _PAGE_BYTES if STATM.exists() else 0


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children(pid: int) -> Iterator[list[str]]:
    with contextlib.suppress(FileNotFoundError):  # some kernels do not list them
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                yield _stat(int(child))


@asynccontextmanager
async def metrics_port(
    settings: MonitoringSettings, create_app: Callable[[Settings], ASGIApp]
) -> AsyncIterator[None]:
    """Serve while the block runs, if there is such a port."""
    if not settings.has_metrics_port:
        yield
        return
    host, port = settings.metrics_host or settings.host, settings.metrics_port
    own = replace(
        settings, host=host, port=port, ssl_certfile="", ssl_keyfile="", cors_origins="", root_path=""
    )
    server = uvicorn.Server(server_config(create_app(own), own, ws="none", lifespan="off"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    sockets = sockets_for(host, port)
    await server.startup(sockets)
    running = asyncio.create_task(server.main_loop(), name="metrics port")
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    announce(f"metrics on http://{in_url(host)}:{port}/metrics")
    try:
        yield
    finally:
        server.should_exit = True
        await running
        await server.shutdown(sockets)
