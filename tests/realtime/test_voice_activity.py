from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.realtime.server_events import DEFAULT_VAD, SessionVad
from asr_server.realtime.turn_types import VoicePaused, VoiceResumed, VoiceStarted, VoiceStopped
from asr_server.realtime.voice_activity import LevelScorer, VoiceActivity, VoiceEvent
from tests.speech import Spoken, say, silence


def listen(
    samples: Samples, vad: SessionVad | None = None, block: int = 800
) -> list[tuple[float, VoiceEvent]]:
    """Each event, and the second in which it came."""
    activity = VoiceActivity(vad or DEFAULT_VAD, LevelScorer())
    return [
        ((first + block) / SAMPLE_RATE, event)
        for first in range(0, len(samples), block)
        for event in activity.push(samples[first : first + block])
    ]


def with_noise(spoken: Spoken, level: float) -> Samples:
    noise = np.random.default_rng(0).standard_normal(len(spoken.samples)).astype(np.float32)
    return spoken.samples + np.float32(level) * noise


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_phrase_starts_near_its_first_word_and_stops_after_the_silence(noise: float) -> None:
    spoken = say("314", gap_s=[0.2, 0.2, 1.5], lead_s=1.0)
    events = listen(with_noise(spoken, noise))
    (_, started), (stopped_s, _) = events[0], events[-1]
    assert isinstance(started, VoiceStarted)
    assert started.at / SAMPLE_RATE == pytest.approx(spoken.times[0][0], abs=0.12)
    assert isinstance(events[-1][1], VoiceStopped)
    assert stopped_s == pytest.approx(spoken.times[-1][1] + 0.5, abs=0.2)
    assert sum(isinstance(event, VoiceStarted) for _, event in events) == 1


def test_a_pause_is_told_before_the_end_and_taken_back_when_speech_goes_on() -> None:
    spoken = say("31", gap_s=[0.42, 1.0])
    kinds = [type(event) for _, event in listen(spoken.samples)]
    assert kinds == [VoiceStarted, VoicePaused, VoiceResumed, VoicePaused, VoiceStopped]


def test_longer_silences_split_and_shorter_ones_do_not() -> None:
    spoken = say("3141", gap_s=[0.3, 0.9, 0.3, 1.0])
    for silence_ms, num_turns in ((500, 2), (1200, 0), (200, 4)):
        events = listen(spoken.samples, replace(DEFAULT_VAD, silence_duration_ms=silence_ms))
        assert sum(isinstance(event, VoiceStopped) for _, event in events) == num_turns


def test_silence_noise_and_clicks_are_no_speech() -> None:
    rng = np.random.default_rng(0)
    clicks = silence(3.0)
    clicks[::8000] = 0.8
    hum = (0.01 * rng.standard_normal(48_000)).astype(np.float32)
    for samples in (silence(3.0), clicks, hum):
        assert listen(samples) == []


def test_a_higher_threshold_wants_louder_speech() -> None:
    spoken = say("31")
    quiet = (0.003 * spoken.samples).astype(np.float32)
    assert (
        listen(with_noise(spoken._replace(samples=quiet), 0.0003), replace(DEFAULT_VAD, threshold=0.99)) == []
    )


def test_the_size_of_appends_changes_nothing() -> None:
    spoken = say("314")
    kinds = [[event for _, event in listen(spoken.samples, block=block)] for block in (100, 801, 16_000)]
    assert kinds[0] == kinds[1] == kinds[2]


def test_after_a_restart_speech_that_goes_on_starts_again() -> None:
    spoken = say("33", gap_s=0.05)
    activity = VoiceActivity(DEFAULT_VAD, LevelScorer())
    half = len(spoken.samples) // 2
    assert isinstance(activity.push(spoken.samples[:half])[0], VoiceStarted)
    activity.restart()
    assert isinstance(activity.push(spoken.samples[half:])[0], VoiceStarted)
