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


def test_the_window_has_fifteen_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    log = ActivityLog()
    log.add_answer("one", FIGURES)
    log.add_sample(sample(100.0))
    assert [len(log.answers(now)) for now in (999.9, 1000.0)] == [1, 0]
    assert [len(log.samples(now)) for now in (999.9, 1000.0)] == [1, 0]
    assert (MAX_ANSWERS, SAMPLE_EVERY_S, SPEED_OVER_S) == (4096, 5.0, 30.0)


def test_a_request_of_which_little_is_known_has_no_audio_key_or_first_text() -> None:
    log = ActivityLog()
    log.add_answer("one", FIGURES)
    log.add_answer("other", FIGURES | {"audio_s": 3.0, "first_text_s": 0.5, "key": "web"})
    one, other = log.answers(time.monotonic())
    assert (one.audio_s, one.first_text_s, one.key) == (0.0, None, "")
    assert (other.audio_s, other.first_text_s, other.key) == (3.0, 0.5, "web")


def test_two_samples_of_one_moment_have_no_speed() -> None:
    assert speeds([sample(1.0), sample(1.0, 5.0)]) == [0.0, 0.0]
