"""The last 15 minutes are kept, and no more, however much happens."""

from __future__ import annotations

import time

import pytest

from asr_server.api.activity import (
    MAX_ANSWERS,
    SAMPLE_EVERY_S,
    SPEED_OVER_S,
    WINDOW_S,
    ActivityLog,
    Sample,
    speeds,
)

FIGURES = {"route": "/v1/audio/transcriptions", "status": 200, "seconds": 2.0}


def sample(at: float, audio_s: float = 0.0) -> Sample:
    return Sample(at, audio_s, 0, 0, 0, 0, 0)


def test_what_is_older_than_the_window_is_left_out() -> None:
    log = ActivityLog()
    log.add_answer("one", FIGURES)
    log.add_sample(sample(time.monotonic()))
    assert [answer.request_id for answer in log.answers(time.monotonic())] == ["one"]
    later = time.monotonic() + WINDOW_S
    assert log.answers(later) == []
    assert log.samples(later) == []


def test_no_number_of_requests_grows_the_memory() -> None:
    log = ActivityLog()
    for number in range(MAX_ANSWERS + 10):
        log.add_answer(str(number), FIGURES)
        log.add_sample(sample(time.monotonic()))
    now = time.monotonic()
    assert [answer.request_id for answer in log.answers(now)][:: MAX_ANSWERS - 1] == [
        "10",
        str(MAX_ANSWERS + 9),
    ]
    assert len(log.samples(now)) == 1 + WINDOW_S / SAMPLE_EVERY_S


def test_a_requests_wait_is_the_mean_of_its_chunks() -> None:
    log = ActivityLog()
    log.add_answer("one", FIGURES | {"chunks": 4, "stages_s": {"chunks_queued": 2.0, "upload": 1.0}})
    log.add_answer("other", FIGURES)
    assert [answer.queue_s for answer in log.answers(time.monotonic())] == [0.5, None]


def test_speed_is_that_of_the_half_minute_before() -> None:
    """Ten seconds of audio a second for half a minute, then nothing."""
    num_samples = round(SPEED_OVER_S / SAMPLE_EVERY_S)
    busy = [sample(SAMPLE_EVERY_S * i, 10 * SAMPLE_EVERY_S * i) for i in range(num_samples + 1)]
    idle = [sample(SAMPLE_EVERY_S * i, busy[-1].audio_s) for i in range(num_samples + 1, 2 * num_samples + 1)]
    assert speeds(busy) == pytest.approx([0.0, *[10.0] * num_samples])
    assert speeds(busy + idle)[-1] == 0.0
    assert speeds(busy + idle)[num_samples + num_samples // 2] == pytest.approx(5.0)
