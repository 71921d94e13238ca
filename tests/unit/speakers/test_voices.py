"""What is heard in one window, by the real models."""

import numpy as np
import pytest

from asr_server.annexes.speakers.clustering import Floats
from asr_server.annexes.speakers.segmentation import FRAME, NUM_FRAMES, WINDOW, segment
from asr_server.annexes.speakers.voices import fbank, hear, hear_reference
from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.noises import by_telephone
from tests.support.speech import say
from tests.unit.speakers.people import join

SHIFT_S = 3.0


@pytest.fixture(scope="module")
def talk() -> tuple[Samples, list[tuple[float, float]]]:
    samples, places = join([say("31415926", "f3"), say("27182818", "rms")])
    return samples[: WINDOW + round(SHIFT_S * SAMPLE_RATE)], places


def one_speaker(samples: Samples, places: list[tuple[float, float]]) -> Floats:
    """What the segmentation would say if it took everybody for the same local speaker."""
    middles_s = np.arange(NUM_FRAMES) * FRAME / SAMPLE_RATE
    speaks = np.any([(start_s < middles_s) & (middles_s < end_s) for start_s, end_s in places], axis=0)
    likely = np.full((NUM_FRAMES, 7), 1e-3, np.float32)
    likely[np.arange(NUM_FRAMES), speaks.astype(int)] = 0.994
    return np.log(likely)


def test_a_speaker_who_sounds_like_two_is_two_voices(talk: tuple[Samples, list[tuple[float, float]]]) -> None:
    samples, places = talk
    first, second = hear(samples[:WINDOW], one_speaker(samples, places)).voices
    assert first.is_half
    assert second.is_half
    assert float(first.embedding @ second.embedding) < 0.3
    border = round((places[0][1] + 0.4) * SAMPLE_RATE / FRAME)  # in the pause between them
    for voice, own in ((first, slice(0, border)), (second, slice(border, NUM_FRAMES))):
        assert voice.activity.sum() == pytest.approx(voice.activity[own].sum(), rel=0.02)


def test_who_goes_on_without_a_pause_is_a_voice_of_their_own() -> None:
    half = WINDOW // 2
    samples = np.concatenate([say("31415926", "f3").samples[:half], say("27182818", "rms").samples[:half]])
    first, second = hear(samples, one_speaker(samples, [(0.0, 10.0)])).voices
    assert float(first.embedding @ second.embedding) < 0.3
    frames_of_s = SAMPLE_RATE / FRAME
    assert first.activity[: round(4.2 * frames_of_s)].all()
    assert second.activity[round(5.8 * frames_of_s) :].all()
    assert not (first.activity.astype(bool) & second.activity.astype(bool)).any()


def test_one_person_is_one_voice_whatever_the_pauses() -> None:
    samples, places = join([say("3141"), say("5926"), say("5358")], pause_s=0.5)
    heard = hear(samples[:WINDOW], one_speaker(samples, places))
    assert [voice.is_half for voice in heard.voices] == [False]
    assert len(heard.alike) >= 1
    assert min(heard.alike) > 0.35


def test_a_telephone_voice_is_told_from_one_here(talk: tuple[Samples, list[tuple[float, float]]]) -> None:
    samples, places = talk
    border = round((places[0][1] + 0.4) * SAMPLE_RATE)  # in the pause between both people
    samples = np.concatenate([samples[:border], by_telephone(samples[border:])])
    heard = hear(samples[:WINDOW], one_speaker(samples, places)).voices
    assert [voice.is_narrow for voice in heard] == [False, True]


def test_what_a_window_has_heard_is_not_heard_again(talk: tuple[Samples, list[tuple[float, float]]]) -> None:
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


# -- On sounds made up ---------------------------------------------------------------------------------------

HISS = np.asarray(0.1 * np.random.default_rng(0).standard_normal(2 * WINDOW), np.float32)
FEATURE = 160  # samples between two features


def kaldi(samples: Samples) -> Floats:
    """Kaldi's features, as transformers computes them for SeamlessM4T."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    mel = mel_filter_bank(
        257, 80, 20.0, 8000.0, SAMPLE_RATE, mel_scale="kaldi", triangularize_in_mel_space=True
    )
    return np.asarray(
        spectrogram(
            samples,
            window_function(400, "povey", periodic=False),
            *(400, FEATURE, 512),
            power=2.0,
            center=False,
            preemphasis=0.97,
            mel_filters=mel,
            log_mel="log",
            mel_floor=float(np.finfo(np.float32).eps),
            remove_dc_offset=True,
        ).T
    )


def test_features_are_kaldis() -> None:
    samples = np.concatenate([say("31", "f3").samples + np.float32(0.1), np.zeros(SAMPLE_RATE, np.float32)])
    expected = kaldi(samples)
    every = np.arange(len(expected))
    assert np.abs(fbank(samples, every) - expected).max() < 1e-2
    some = every[3::7]
    assert np.abs(fbank(samples, some) - expected[some]).max() < 1e-2


def saying(*parts: tuple[int, int, int], sure: float = 0.994) -> Floats:
    """Log-probabilities: of each part its first frame, the one behind its last, and its class."""
    likely = np.full((NUM_FRAMES, 7), (1 - sure) / 6, np.float32)
    classes = np.zeros(NUM_FRAMES, int)
    for first, end, number in parts:
        classes[first:end] = number
    likely[np.arange(NUM_FRAMES), classes] = sure
    return np.log(likely)


DIPS_S = 2.3, 5.4, 7.1, 10.2, 12.6, 15.3


def test_windows_that_overlap_cut_a_long_stretch_at_the_same_quiet_moments() -> None:
    recording = HISS.copy()
    for dip_s in DIPS_S:
        recording[round(dip_s * SAMPLE_RATE) :][:480] = 0
    starts_s: list[list[float]] = []
    for start in (0, 5 * SAMPLE_RATE):
        heard = hear(recording[start : start + WINDOW], saying((0, NUM_FRAMES, 1)), start)
        starts_s.append([each.start / SAMPLE_RATE for each in heard.stretches])
        ends = [each.end for each in heard.stretches]
        assert ends[:-1] == [each.start for each in heard.stretches[1:]]
    assert starts_s[0] == pytest.approx([0, 2.3, 5.4, 7.1], abs=0.03)
    assert starts_s[1] == pytest.approx([5.0, 7.1, 10.2, 12.6], abs=0.03)


def test_a_reference_is_who_speaks_most_in_its_first_ten_seconds() -> None:
    assert hear_reference(np.zeros(SAMPLE_RATE, np.float32)).tolist() == [0.0] * 192
    main, other = say("3141592", "f3").samples, say("2", "rms").samples
    alone = hear_reference(main)
    assert float(hear_reference(np.concatenate([other, main])) @ alone) > 0.7
    late = np.concatenate([main, say("2718281828459045", "rms").samples])
    assert float(hear_reference(late[: WINDOW + 1]) @ hear_reference(late[:WINDOW])) == pytest.approx(1)
