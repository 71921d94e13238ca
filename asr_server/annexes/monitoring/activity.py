"""`/v1/activity`: what the server did in the last 15 minutes, for the page that shows it."""

import asyncio
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, Request
from prometheus_client import Counter

from asr_server import __version__, metrics
from asr_server.annexes.monitoring.metrics import DECODING, Labels, Usage, resident_bytes, usages_of
from asr_server.api.middleware import Ended
from asr_server.api.models import ServedModel
from asr_server.api.state import AppState, caller_of, get_state, require_key

WINDOW_S: Final = 900.0
SAMPLE_EVERY_S: Final = 5.0
SPEED_OVER_S: Final = 30.0
MAX_SAMPLES: Final = 1 + round(WINDOW_S / SAMPLE_EVERY_S)


class Sample(NamedTuple):
    """The figures of one moment, `at`; the fields behind `audio_s` are the timeline's."""

    at: float
    audio_s: float  # transcribed since the start
    requests: int
    chunks_waiting: int
    slots: int
    slots_in_use: int
    sessions: int


def speeds(samples: Sequence[Sample]) -> list[float]:
    """Return the seconds of audio transcribed a second before each sample."""
    num_back = round(SPEED_OVER_S / SAMPLE_EVERY_S)
    pairs = ((samples[max(0, index - num_back)], last) for index, last in enumerate(samples))
    return [(b.audio_s - a.audio_s) / (b.at - a.at) if b.at > a.at else 0.0 for a, b in pairs]


MAX_LISTED: Final = 20

# For the page, and not in the API's description.
router = APIRouter(prefix="/v1", dependencies=[Depends(require_key)], include_in_schema=False)


@router.get("/activity")
async def activity(request: Request) -> dict[str, Any]:
    """Return what the server did in the last 15 minutes, or in its last 4096 requests."""
    state = get_state(request)
    usages = await usages_of(state)
    now = time.monotonic()
    ended = [each for each in state.history.recent if now - each.at < WINDOW_S]
    answers, account = [each.figures for each in ended], caller_of(request).account
    own = None if account is None or account.is_admin else account.name
    shown = [each for each in ended if own in (None, each.figures.get("key"))]
    return {
        "version": __version__,
        "uptime_s": int(now - state.history.began_at),
        "models": list(map(_running, state.models)),
        "replicas": [replica for model in state.models for replica in _replicas(model, usages)],
        "resident_bytes": resident_bytes(),  # of the server's own process
        "decoding_bytes": _resident_bytes(usages.get(DECODING)),
        "restarts": {  # since the start
            labels["reason"]: int(value) for labels, value in _values(metrics.replica_restarts) if value
        },
        "statuses": Tally(str(figures["status"]) for figures in answers),
        "latency": _shares(figures["seconds"] for figures in answers if figures.get("audio_s")),
        "first_text": _shares(figures.get("first_text_s") for figures in answers),
        "queue": _shares(map(_queue_s, answers)),
        "jobs": _jobs(),
        "timeline": _timeline([each for each in request.app.state.samples if now - each.at < WINDOW_S], now),
        "last": [_listed(each, now) for each in shown[: -MAX_LISTED - 1 : -1]],
    }


def _jobs() -> dict[str, float] | None:
    """Return those of the last look at them; None on a server without jobs."""
    queued = metrics.REGISTRY.get_sample_value("asr_jobs", {"status": "queued"})
    oldest_s = metrics.REGISTRY.get_sample_value("asr_jobs_oldest_queued_seconds")
    return None if queued is None or oldest_s is None else {"queued": queued, "oldest_queued_s": oldest_s}


def _values(counter: Counter) -> list[tuple[Mapping[str, str], float]]:
    samples = [sample for family in counter.collect() for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples]


def _running(model: ServedModel) -> dict[str, str | None]:
    engine = model.dispatcher.engine
    device, dtype = (engine.device, engine.dtype) if engine else (None, None)
    return {"name": model.name, "state": model.state, "device": device, "dtype": dtype}


def _replicas(model: ServedModel, usages: Mapping[Labels, Usage]) -> Iterator[dict[str, Any]]:
    supervisor = model.dispatcher.supervisor
    states = {state.replica.name: state for state in supervisor.replica_states}
    for name in (f"replica {index}" for index in range(supervisor.num_replicas)):
        state = states.get(name)
        yield {
            "model": model.name,
            "name": name,
            "ready": state is not None and state.ready,
            "slots": state.num_slots if state else 0,
            "slots_in_use": state.heartbeat.slots_in_use if state else 0,
            "resident_bytes": _resident_bytes(usages.get((model.name, name))),
        }


def _resident_bytes(usage: Usage | None) -> int | None:
    return usage.resident_bytes if usage else None


def _queue_s(figures: Mapping[str, Any]) -> float | None:
    queued_s = figures.get("stages_s", {}).get("chunks_queued")
    return None if queued_s is None else float(queued_s / figures["chunks"])


def _shares(values_s: Iterable[float | None]) -> dict[str, float] | None:
    """Return the seconds that half of them, 95 % and 99 % stay below."""
    known_s = [value_s for value_s in values_s if value_s is not None]
    if not known_s:
        return None
    percentiles = np.percentile(known_s, (50, 95, 99))
    return dict(zip(("p50", "p95", "p99"), (round(float(value), 3) for value in percentiles), strict=True))


def _timeline(samples: Sequence[Sample], now: float) -> dict[str, list[float]]:
    return {
        "seconds_ago": [round(now - sample.at, 1) for sample in samples],
        "speed": [round(speed, 2) for speed in speeds(samples)],
    } | {name: [getattr(sample, name) for sample in samples] for name in Sample._fields[2:]}


def _listed(ended: Ended, now: float) -> dict[str, Any]:
    figures = {name: ended.figures.get(name, 0.0) for name in ("route", "status", "seconds", "audio_s")}
    return {"id": ended.request_id, "seconds_ago": round(now - ended.at, 1)} | figures


async def keep_sampling(state: AppState, samples: deque[Sample]) -> None:
    while True:
        samples.append(_sample(state))
        await asyncio.sleep(SAMPLE_EVERY_S)


def _sample(state: AppState) -> Sample:
    dispatchers = [model.dispatcher for model in state.models]
    replicas = [replica for dispatcher in dispatchers for replica in dispatcher.supervisor.replica_states]
    return Sample(
        time.monotonic(),
        sum(value for _, value in _values(metrics.audio_transcribed_seconds)),
        state.admission.num_in_flight,
        sum(dispatcher.num_waiting for dispatcher in dispatchers),
        sum(replica.num_slots for replica in replicas),
        sum(replica.heartbeat.slots_in_use for replica in replicas),
        state.realtime.num_active,
    )
