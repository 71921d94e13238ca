"""`/v1/activity`: what the server did in the last 15 minutes, for the page that shows it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

import numpy as np
from fastapi import APIRouter, Depends, Request
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.types import Scope

from asr_server import __version__, metrics
from asr_server.annexes.monitoring.metrics import (
    DECODING,
    Labels,
    Usage,
    child_pids,
    resident_bytes,
    usage_of_each,
)
from asr_server.api.middleware import SAFE_METHODS
from asr_server.api.models import ServedModel
from asr_server.api.state import AppState, caller_of, get_state, require_key
from asr_server.metrics import RequestStats
from asr_server.telemetry import current_request_id

WINDOW_S: Final = 900.0
SAMPLE_EVERY_S: Final = 5.0
SPEED_OVER_S: Final = 30.0
MAX_ANSWERS: Final = 4096


class Answer(NamedTuple):
    ended_at: float
    request_id: str
    route: str
    status: int
    duration_s: float
    audio_s: float
    first_text_s: float | None
    queue_s: float | None  # its chunks' mean wait for a slot
    key: str  # its name, if it has one


class Sample(NamedTuple):
    """The figures of one moment, `at`; the fields behind `audio_s` are the timeline's."""

    at: float
    audio_s: float  # transcribed since the start
    requests: int
    chunks_waiting: int
    slots: int
    slots_in_use: int
    sessions: int


class ActivityLog:
    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._answers: deque[Answer] = deque(maxlen=MAX_ANSWERS)
        self._samples: deque[Sample] = deque(maxlen=1 + round(WINDOW_S / SAMPLE_EVERY_S))

    @property
    def uptime_s(self) -> int:
        return int(time.monotonic() - self._began_at)

    def on_begun(self, scope: Scope, stats: RequestStats) -> None:
        pass

    def on_ended(self, what: str, stats: RequestStats, figures: Mapping[str, Any]) -> None:
        """Remember a request by the figures of its log line."""
        if figures.get("method") in SAFE_METHODS or "status" not in figures:
            return
        queued_s = figures.get("stages_s", {}).get("chunks_queued")
        self._answers.append(
            Answer(
                time.monotonic(),
                current_request_id.get(),
                figures["route"],
                figures["status"],
                figures["seconds"],
                figures.get("audio_s", 0.0),
                figures.get("first_text_s"),
                None if queued_s is None else queued_s / figures["chunks"],
                figures.get("key", ""),
            )
        )

    def add_sample(self, sample: Sample) -> None:
        self._samples.append(sample)

    def answers(self, now: float) -> list[Answer]:
        return [answer for answer in self._answers if now - answer.ended_at < WINDOW_S]

    def samples(self, now: float) -> list[Sample]:
        return [sample for sample in self._samples if now - sample.at < WINDOW_S]


def speeds(samples: list[Sample]) -> list[float]:
    """Return the seconds of audio transcribed a second before each sample."""
    num_back = round(SPEED_OVER_S / SAMPLE_EVERY_S)
    return [_speed_between(samples[max(0, index - num_back)], sample) for index, sample in enumerate(samples)]


def _speed_between(first: Sample, last: Sample) -> float:
    return (last.audio_s - first.audio_s) / (last.at - first.at) if last.at > first.at else 0.0


MAX_LISTED: Final = 20

# For the page, and not in the API's description.
router = APIRouter(prefix="/v1", dependencies=[Depends(require_key)], include_in_schema=False)


@router.get("/activity")
async def activity(request: Request) -> dict[str, Any]:
    """Return what the server did in the last 15 minutes, or in its last 4096 requests."""
    state, log = get_state(request), activity_log_of(request.app)
    usages = await asyncio.to_thread(usage_of_each, child_pids(state))
    now = time.monotonic()
    answers = log.answers(now)
    account = caller_of(request).account
    shown = [each for each in answers if account is None or account.is_admin or each.key == account.name]
    return {
        "version": __version__,
        "uptime_s": log.uptime_s,
        "models": list(map(_running, state.models)),
        "replicas": [replica for model in state.models for replica in _replicas(model, usages)],
        "resident_bytes": resident_bytes(),  # of the server's own process
        "decoding_bytes": _resident_bytes(usages.get(DECODING)),
        "restarts": {  # since the start
            labels["reason"]: int(value) for labels, value in _values(metrics.replica_restarts) if value
        },
        "statuses": Tally(str(answer.status) for answer in answers),
        "latency": _shares(answer.duration_s for answer in answers if answer.audio_s),
        "first_text": _shares(answer.first_text_s for answer in answers),
        "queue": _shares(answer.queue_s for answer in answers),
        "timeline": _timeline(log.samples(now), now),
        "last": [_listed(answer, now) for answer in shown[: -MAX_LISTED - 1 : -1]],
    }


def _values(counter: Counter) -> list[tuple[Mapping[str, str], float]]:
    samples = [sample for family in counter.collect() for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples]


def _running(model: ServedModel) -> dict[str, str | None]:
    engine = model.dispatcher.engine
    device, dtype = (engine.device, engine.dtype) if engine else (None, None)
    return {"name": model.name, "state": model.state, "device": device, "dtype": dtype}


def _replicas(model: ServedModel, usages: Mapping[Labels, Usage]) -> Iterator[dict[str, Any]]:
    """Yield those that are away too."""
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


def _shares(values_s: Iterable[float | None]) -> dict[str, float] | None:
    """Return the seconds that half of them, 95 % and 99 % stay below."""
    known_s = [value_s for value_s in values_s if value_s is not None]
    if not known_s:
        return None
    percentiles = np.percentile(known_s, (50, 95, 99))
    return dict(zip(("p50", "p95", "p99"), (round(float(value), 3) for value in percentiles), strict=True))


def _timeline(samples: list[Sample], now: float) -> dict[str, list[float]]:
    """Return a value every five seconds, the oldest first."""
    return {
        "seconds_ago": [round(now - sample.at, 1) for sample in samples],
        "speed": [round(speed, 2) for speed in speeds(samples)],
    } | {name: [getattr(sample, name) for sample in samples] for name in Sample._fields[2:]}


def _listed(answer: Answer, now: float) -> dict[str, str | float]:
    return {
        "id": answer.request_id,
        "route": answer.route,
        "status": answer.status,
        "seconds_ago": round(now - answer.ended_at, 1),
        "seconds": answer.duration_s,
        "audio_s": answer.audio_s,
    }


def activity_log_of(app: Starlette) -> ActivityLog:
    return cast(ActivityLog, app.state.activity)


async def keep_sampling(state: AppState, log: ActivityLog) -> None:
    """Run until cancelled."""
    while True:
        log.add_sample(_sample(state))
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
