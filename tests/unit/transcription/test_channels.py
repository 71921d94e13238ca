"""Voices that one channel hides from the mix, and that leak into the other speaker's channel."""

import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.metrics import REGISTRY
from tests.support.fake_replica import noise, say, wav
from tests.support.speech import say as speak
from tests.support.speech import silence
from tests.support.tokens import words
from tests.unit.transcription.running_app import ENGLISH, RunningApp

ANN, BOB = speak("31415926", "rms").samples, speak("27182", "linda").samples
ROOM = np.random.default_rng(3)


def padded(sound: Samples, before_s: float, duration_s: float) -> Samples:
    lead = silence(before_s)
    return np.concatenate([lead, sound, silence(duration_s)])[: round(duration_s * SAMPLE_RATE)]


def counted_s() -> float:
    name = "asr_audio_transcribed_seconds_total"
    return sum(s.value for metric in REGISTRY.collect() for s in metric.samples if s.name == name)


def leaked(sound: Samples, level_db: float) -> Samples:
    """The sound in the other speaker's microphone: later, through a room, with a little noise."""
    echoes = np.zeros(2400, np.float32)
    echoes[80] = 1.0
    echoes[200:] = ROOM.normal(0, 0.05, 2200) * np.exp(-np.arange(2200) / 500)
    far = np.convolve(sound, echoes)[: len(sound)] * np.float32(10 ** (level_db / 20))
    return np.asarray(far + ROOM.normal(0, 1e-4, len(far)), np.float32)


@pytest.mark.parametrize("level_db", [-8.0, -15.0, -25.0])
async def test_a_voice_leaking_into_the_other_channel_is_read_once(app: RunningApp, level_db: float) -> None:
    duration_s = 14.0
    ann, bob = padded(ANN, 0.5, duration_s), padded(BOB, 8.0, duration_s)
    sides = ann + leaked(bob, level_db), bob + leaked(ann, level_db)
    app.answer = lambda submit: say(*words("31415926"))
    await app.transcribe(wav(np.stack(sides, axis=1)), ENGLISH, ("ann", "bob"))
    first, second = app.replica.submits
    assert np.abs(first.samples[round(8.2 * SAMPLE_RATE) :]).max(initial=0.0) < 0.02
    assert np.abs(second.samples).max() == pytest.approx(np.abs(BOB).max(), rel=0.1)
    assert len(second.samples) / SAMPLE_RATE < 6.0, "of the second channel only its own speech is read"


async def test_both_are_read_where_they_speak_at_once_one_softer_than_the_other(app: RunningApp) -> None:
    duration_s = 6.0
    ann, bob = padded(ANN, 0.3, duration_s), padded(BOB, 0.6, duration_s) * np.float32(0.4)
    app.answer = lambda submit: say(*words("1"))
    await app.transcribe(wav(np.stack([ann, bob], axis=1)), ENGLISH, ("ann", "bob"))
    _, second = app.replica.submits
    assert np.abs(second.samples).sum() > 0.9 * np.abs(bob).sum()


@pytest.mark.parametrize("level", [1.0, 0.8])
async def test_equal_channels_are_read_once_and_the_answer_says_so(app: RunningApp, level: float) -> None:
    app.answer = lambda submit: say(*words("1"))
    sound = np.stack([ANN, ANN * np.float32(level)], axis=1)
    _, transcript = await app.transcribe(wav(sound), ENGLISH, ("ann", "bob"))
    assert transcript.text == "one"
    assert [segment.speaker for segment in transcript.segments] == ["ann"]
    assert [(each.reason, each.text) for each in transcript.dropped] == [("same_channel", "")]


async def test_a_voice_that_noise_in_the_other_channel_hides_is_read_from_its_own(app: RunningApp) -> None:
    """Where the noise ends, the mix is read; the file's seconds are counted once."""
    sound = np.concatenate([ANN, silence(1.0), BOB])
    loud = np.concatenate([noise(len(ANN) / SAMPLE_RATE) * 3, silence(len(sound) / SAMPLE_RATE)])[
        : len(sound)
    ]
    app.answer = lambda submit: say(*words("1"))
    before_s = counted_s()
    await app.transcribe(wav(np.stack([loud, sound], axis=1)), ENGLISH)
    (submit,) = app.replica.submits
    num_clear = len(ANN) - SAMPLE_RATE // 2
    assert np.abs(submit.samples[:num_clear] - ANN[:num_clear]).max() < 1e-3
    assert np.abs(submit.samples[-SAMPLE_RATE:] - BOB[-SAMPLE_RATE:] / 2).max() < 1e-3
    assert counted_s() - before_s == pytest.approx(len(sound) / SAMPLE_RATE)


async def test_a_silent_stereo_recording_is_counted_once(app: RunningApp) -> None:
    app.answer = lambda submit: say()
    before_s = counted_s()
    await app.transcribe(wav(np.repeat(noise(3.0)[:, None], 2, axis=1)))
    assert counted_s() - before_s == pytest.approx(3.0)
