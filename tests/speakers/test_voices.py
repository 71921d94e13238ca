"""What is heard in one window, by the real models."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.speakers.segmentation import FRAME, NUM_FRAMES, WINDOW, Floats, segment
from asr_server.speakers.voices import hear
from benchmarks.speech.telephone import by_telephone
from tests.speakers.people import join, require_models
from tests.speech import say

SHIFT_S = 3.0


@pytest.fixture(scope="module")
def talk() -> tuple[Samples, list[tuple[float, float]]]:
    require_models()
    samples, places = join([say("31415926", "f3"), say("27182818", "rms")])
    return samples[: WINDOW + round(SHIFT_S * SAMPLE_RATE)], places


def one_speaker(samples: Samples, places: list[tuple[float, float]]) -> Floats:
    """What the segmentation would say if it took everybody for the same local speaker."""
    middles_s = np.arange(NUM_FRAMES) * FRAME / SAMPLE_RATE
    speaks = np.any([(start_s < middles_s) & (middles_s < end_s) for start_s, end_s in places], axis=0)
    likely = np.full((NUM_FRAMES, 7), 1e-3, np.float32)
    likely[np.arange(NUM_FRAMES), speaks.astype(int)] = 0.994
    return np.log(likely)


def test_a_local_speaker_that_sounds_like_two_people_is_two_voices(
    talk: tuple[Samples, list[tuple[float, float]]],
) -> None:
    samples, places = talk
    first, second = hear(samples[:WINDOW], one_speaker(samples, places)).voices
    assert first.is_half
    assert second.is_half
    assert float(first.embedding @ second.embedding) < 0.3
    border = round((places[0][1] + 0.4) * SAMPLE_RATE / FRAME)  # in the pause between them
    for voice, own in ((first, slice(0, border)), (second, slice(border, NUM_FRAMES))):
        assert voice.activity.sum() == pytest.approx(voice.activity[own].sum(), rel=0.02)


def test_who_goes_on_without_a_pause_is_a_voice_of_their_own() -> None:
    require_models()
    half = WINDOW // 2
    samples = np.concatenate([say("31415926", "f3").samples[:half], say("27182818", "rms").samples[:half]])
    first, second = hear(samples, one_speaker(samples, [(0.0, 10.0)])).voices
    assert float(first.embedding @ second.embedding) < 0.3
    frames_of_s = SAMPLE_RATE / FRAME
    assert first.activity[: round(4.2 * frames_of_s)].all()
    assert second.activity[round(5.8 * frames_of_s) :].all()
    assert not (first.activity.astype(bool) & second.activity.astype(bool)).any()


def test_one_person_is_one_voice_whatever_the_pauses() -> None:
    require_models()
    samples, places = join([say("3141"), say("5926"), say("5358")], pause_s=0.5)
    heard = hear(samples[:WINDOW], one_speaker(samples, places))
    assert [voice.is_half for voice in heard.voices] == [False]
    assert len(heard.alike) >= 1
    assert min(heard.alike) > 0.35


def test_a_voice_by_telephone_is_told_from_one_in_the_room(
    talk: tuple[Samples, list[tuple[float, float]]],
) -> None:
    samples, places = talk
    border = round((places[0][1] + 0.4) * SAMPLE_RATE)  # in the pause between both people
    samples = np.concatenate([samples[:border], by_telephone(samples[border:])])
    heard = hear(samples[:WINDOW], one_speaker(samples, places)).voices
    assert [voice.is_narrow for voice in heard] == [False, True]


def test_what_the_window_before_has_heard_is_not_heard_again(
    talk: tuple[Samples, list[tuple[float, float]]],
) -> None:
    samples, _ = talk
    shift = round(SHIFT_S * SAMPLE_RATE)
    before = hear(samples[:WINDOW], segment(samples[:WINDOW])[0]).stretches
    window = samples[shift : shift + WINDOW]
    after = hear(window, segment(window)[0], shift, before).stretches
    known = [stretch.embedding.tobytes() for stretch in before]
    shared = [
        stretch
        for stretch in after
        if any(
            min(stretch.end, each.end) - max(stretch.start, each.start) > 0.8 * (stretch.end - stretch.start)
            for each in before
        )
    ]
    assert shared
    assert all(stretch.embedding.tobytes() in known for stretch in shared)
    assert all(stretch.start >= shift for stretch in after), "on the recording's clock"
