import numpy as np
import pytest
from msgspec.structs import replace

from asr_server.annexes.realtime import audio_in
from asr_server.annexes.realtime.audio_in import LATE_FRAMES, ONSET_MARGIN_MS, VoiceActivity, VoiceEvent
from asr_server.annexes.realtime.server_events import DEFAULT_VAD, SessionVad
from asr_server.annexes.realtime.turn_types import SAMPLES_PER_MS, Signal, VoiceStarted
from asr_server.audio.voice import FRAME
from asr_server.core import SAMPLE_RATE, Samples
from tests.support.noises import make_noise
from tests.support.speech import VOICES, Spoken, say, silence


def listen(
    samples: Samples, vad: SessionVad | None = None, block: int = 800
) -> list[tuple[float, VoiceEvent]]:
    """Each event, and the second in which it came."""
    activity = VoiceActivity(vad or DEFAULT_VAD)
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
    assert events[-1][1] is Signal.VOICE_STOPPED
    assert stopped_s == pytest.approx(spoken.times[-1][1] + 0.5, abs=0.2)
    assert sum(isinstance(event, VoiceStarted) for _, event in events) == 1


def test_a_pause_is_told_before_the_end_and_taken_back_when_speech_goes_on() -> None:
    spoken = say("31", gap_s=[0.42, 1.0])
    _, *others = (event for _, event in listen(spoken.samples))
    assert others == [Signal.VOICE_PAUSED, Signal.VOICE_RESUMED, Signal.VOICE_PAUSED, Signal.VOICE_STOPPED]


def test_longer_silences_split_and_shorter_ones_do_not() -> None:
    spoken = say("3141", gap_s=[0.3, 0.9, 0.3, 1.0])
    for silence_ms, num_turns in ((500, 2), (1200, 0), (200, 4)):
        events = listen(spoken.samples, replace(DEFAULT_VAD, silence_duration_ms=silence_ms))
        assert [event for _, event in events].count(Signal.VOICE_STOPPED) == num_turns


def test_silence_and_clicks_are_no_speech() -> None:
    clicks = silence(3.0)
    clicks[::8000] = 0.8
    for samples in (silence(3.0), clicks):
        assert listen(samples) == []


@pytest.mark.parametrize("level_db", [-50, -35, -20])
@pytest.mark.parametrize("kind", ["white", "pink", "hum", "tones"])
def test_what_sounds_and_is_no_voice_begins_no_turn(kind: str, level_db: int) -> None:
    assert listen(make_noise(kind, level_db, 20.0)) == []


@pytest.mark.parametrize("voice", VOICES)
def test_a_word_alone_is_heard_while_its_beginning_is_still_held(voice: str) -> None:
    spoken = say("0123456789", voice, gap_s=1.0)
    started = [(came_s, e) for came_s, e in listen(spoken.samples, block=1600) if isinstance(e, VoiceStarted)]
    assert len(started) == 10
    for (came_s, event), (start_s, _) in zip(started, spoken.times, strict=True):
        assert event.at / SAMPLE_RATE == pytest.approx(start_s, abs=0.12)
        assert came_s * SAMPLE_RATE - event.at <= ONSET_MARGIN_MS * SAMPLES_PER_MS


def test_a_threshold_is_how_sure_of_speech_the_detector_must_be() -> None:
    loud_noise = with_noise(say("31415"), 0.2)
    heard = [bool(listen(loud_noise, replace(DEFAULT_VAD, threshold=t))) for t in (0.1, 0.5, 0.99, 1.0)]
    assert heard == [True, True, False, False]


def test_the_size_of_appends_changes_nothing() -> None:
    spoken = say("314")
    kinds = [[event for _, event in listen(spoken.samples, block=block)] for block in (100, 801, 16_000)]
    assert kinds[0] == kinds[1] == kinds[2]


def test_after_a_restart_speech_that_goes_on_starts_again() -> None:
    spoken = say("33", gap_s=0.05)
    activity = VoiceActivity(DEFAULT_VAD)
    half = len(spoken.samples) // 2
    assert isinstance(activity.push(spoken.samples[:half])[0], VoiceStarted)
    activity.restart()
    assert isinstance(activity.push(spoken.samples[half:])[0], VoiceStarted)


def test_a_shorter_silence_set_within_the_trailing_silence_ends_the_speech_that_goes_before() -> None:
    spoken = say("31", gap_s=[0.3, 1.5])
    activity = VoiceActivity(replace(DEFAULT_VAD, silence_duration_ms=5000))
    before = activity.push(spoken.samples)
    assert [type(event) for event in before] == [VoiceStarted]
    activity.configure(replace(DEFAULT_VAD, silence_duration_ms=300))
    assert Signal.VOICE_STOPPED in activity.push(silence(0.2))


def test_settings_changed_in_mid_speech_begin_no_second_speech() -> None:
    spoken = say("3141", gap_s=[0.2, 0.2, 0.2, 1.0])
    activity, half = VoiceActivity(DEFAULT_VAD), len(spoken.samples) // 2
    events = activity.push(spoken.samples[:half])
    activity.configure(replace(DEFAULT_VAD, threshold=0.4))
    events += activity.push(spoken.samples[half:])
    assert sum(isinstance(event, VoiceStarted) for event in events) == 1


# -- Frame by frame --


class Stated:
    """A detector whose frames hold their own probability."""

    def push(self, samples: Samples) -> Samples:
        return samples[::FRAME]


def by_frame(probabilities: list[float], activity: VoiceActivity) -> list[tuple[int, VoiceEvent]]:
    """Return each event with the number of its frame, counted from 1."""
    return [
        (number, event)
        for number, probability in enumerate(probabilities, 1)
        for event in activity.push(np.full(FRAME, probability, np.float32))
    ]


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_in, "VoiceDetector", Stated)


@pytest.mark.usefixtures("stated")
def test_two_frames_of_speech_start_it_and_silence_pauses_it_at_a_third_and_stops_it_at_its_end() -> None:
    vad = replace(DEFAULT_VAD, silence_duration_ms=(LATE_FRAMES + 8) * 32)
    frames = [0.4, 0.5, 0.4, 0.5, 0.5] + [0.9] * 3 + [0.1] * 9
    assert by_frame(frames, VoiceActivity(vad)) == [
        (5, VoiceStarted(3 * FRAME)),
        (11, Signal.VOICE_PAUSED),
        (16, Signal.VOICE_STOPPED),
    ]
    later = by_frame(frames, VoiceActivity(vad, 100 * FRAME))
    assert later[0] == (5, VoiceStarted(103 * FRAME))


@pytest.mark.usefixtures("stated")
def test_a_frame_of_speech_alone_takes_no_pause_back_and_two_begin_the_silence_again() -> None:
    vad = replace(DEFAULT_VAD, silence_duration_ms=(LATE_FRAMES + 8) * 32)
    click = by_frame([0.9] * 2 + [0.1] * 5 + [0.9] + [0.1] * 5, VoiceActivity(vad))
    assert click == [(2, VoiceStarted(0)), (5, Signal.VOICE_PAUSED), (11, Signal.VOICE_STOPPED)]
    again = by_frame([0.9] * 2 + [0.1] * 5 + [0.9] * 2 + [0.1] * 8, VoiceActivity(vad))
    assert again == [
        *((2, VoiceStarted(0)), (5, Signal.VOICE_PAUSED), (9, Signal.VOICE_RESUMED)),
        *((12, Signal.VOICE_PAUSED), (17, Signal.VOICE_STOPPED)),
    ]
