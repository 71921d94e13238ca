"""What is taken for speech."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime  # type: ignore[import-untyped]
import pytest

from asr_server.audio import voice as voice_module
from asr_server.audio.voice import (
    CONTEXT,
    DETECTOR,
    FRAME,
    PAUSE_S,
    STATE_SHAPE,
    VoiceDetector,
    first_missed_s,
    frames_of,
    is_speech,
    load_onnx,
    possible_and_certain_s,
    speech_probabilities,
)
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.levels import Interval
from asr_server.machine import VNNI_FLAGS
from tests.support.noises import KINDS, make_noise, thump
from tests.support.speech import VOICES, say


def certain_speech_s(samples: Samples) -> list[Interval]:
    return possible_and_certain_s(frames_of(samples))[1]


def holds_speech(samples: Samples) -> bool:
    return bool(possible_and_certain_s(frames_of(samples))[0])


@pytest.mark.parametrize("voice", VOICES)
def test_spoken_digits_are_speech(voice: str) -> None:
    spoken = say("8305", voice, gap_s=1.0)
    probabilities = speech_probabilities(spoken.samples)
    for start_s, end_s in spoken.times:
        frames = slice(int(start_s * SAMPLE_RATE) // FRAME, int(end_s * SAMPLE_RATE) // FRAME + 1)
        assert probabilities[frames].max() > 0.8


@pytest.mark.parametrize("level_db", [-60, -40, -6])
@pytest.mark.parametrize("digit", "0123456789")
def test_one_short_word_is_enough_at_any_level(digit: str, level_db: int) -> None:
    word = say(digit, "rms", gap_s=0.0, lead_s=0.0).samples
    assert holds_speech(word * np.float32(10 ** (level_db / 20)))


@pytest.mark.parametrize("digits", ["407", "98653"])
def test_neither_an_offset_nor_clicks_deafen_the_detector(digits: str) -> None:
    faint = say(digits, "rms").samples * np.float32(10 ** (-44 / 20))
    clicks = np.zeros_like(faint)
    clicks[:: SAMPLE_RATE // 2] = 1.0
    assert holds_speech(faint + np.float32(0.5))
    assert holds_speech(faint + clicks)
    assert certain_speech_s(faint + clicks)


def test_thumps_do_not_deafen_the_detector() -> None:
    """They are 50 dB louder than the speech and a twelfth of its time."""
    spoken = say("8305", gap_s=0.2).samples
    faint = np.tile(spoken * np.float32(10 ** (-30 / 20)), 4)
    one, thumps = thump(), np.zeros_like(faint)
    for at in range(0, len(thumps) - len(one), 3 * SAMPLE_RATE):
        thumps[at : at + len(one)] = one
    assert holds_speech(faint + thumps)
    assert sum(end_s - start_s for start_s, end_s in certain_speech_s(faint + thumps)) > 1.0
    assert not holds_speech(make_noise("pink", -50, len(thumps) / SAMPLE_RATE + 1)[: len(thumps)] + thumps)


@pytest.mark.parametrize("kind", ["silence", "hum", "white", "pink"])
def test_noise_holds_no_speech(kind: str) -> None:
    assert not holds_speech(make_noise(kind, -30, 5.0))


def mains_hum(pitch_hz: float, falloff: float, duration_s: float) -> Samples:
    """Thirty harmonics in phase, as of a bad cable: it buzzes."""
    phases = 2 * np.pi * pitch_hz * np.arange(round(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    sound = np.sum([np.sin(k * phases) / k**falloff for k in range(1, 31)], axis=0)
    return np.asarray(0.05 * sound / sound.std(), np.float32)


@pytest.mark.parametrize("pitch_hz", [50, 60, 100])
@pytest.mark.parametrize("falloff", [0.3, 1.0, 2.0])
def test_a_clean_hum_is_no_speech(pitch_hz: float, falloff: float) -> None:
    for duration_s in (0.5, 2.96):
        hum = mains_hum(pitch_hz, falloff, duration_s)
        assert not holds_speech(hum)
        assert possible_and_certain_s(frames_of(np.round(hum * 32768) / np.float32(32768))) == ([], [])


def test_a_hum_does_not_drown_speech() -> None:
    spoken = say("98653", "rms").samples
    loud = mains_hum(50, 1.0, len(spoken) / SAMPLE_RATE) * np.float32(4 * spoken.std() / 0.05)
    assert not certain_speech_s(loud)
    assert certain_speech_s(spoken + loud)


@pytest.mark.parametrize("voice", VOICES)
def test_speech_behind_a_pause_is_found_where_it_begins(voice: str) -> None:
    spoken = say("7", voice, lead_s=2.0)
    for sound in (spoken.samples, np.concatenate([say("4", voice, lead_s=0.1).samples, spoken.samples])):
        begins_s = spoken.times[0][0] + (len(sound) - len(spoken.samples)) / SAMPLE_RATE
        assert first_missed_s(certain_speech_s(sound)) == pytest.approx(begins_s, abs=0.15)


def test_what_comes_within_a_second_is_not_behind_a_pause() -> None:
    assert first_missed_s(certain_speech_s(say("74", lead_s=0.6).samples)) is None


@pytest.mark.parametrize("kind", ["silence", "hum", "white", "pink", "tones", "music", "coughs"])
def test_no_noise_is_certain_to_be_speech(kind: str) -> None:
    assert [certain_speech_s(make_noise(kind, -30, 10.0, seed)) for seed in range(3)] == [[]] * 3


def test_samples_in_blocks_of_any_size_are_worth_the_same_as_all_at_once() -> None:
    samples = say("8305", "linda").samples
    whole, detector = speech_probabilities(samples), VoiceDetector()
    blocks = [detector.push(samples[at : at + 700]) for at in range(0, len(samples), 700)]
    np.testing.assert_allclose(np.concatenate([*blocks, detector.finish()]), whole, atol=1e-5)
    assert len(whole) == -(-len(samples) // FRAME)


def test_probabilities_are_those_of_the_packages_own_graph() -> None:
    noises = [make_noise(kind, -30, 4.0, 1) for kind in KINDS]
    speech = [say("83059174", voice, gap_s=0.4).samples for voice in VOICES]
    samples = np.concatenate([*noises, *speech, *(1e-3 * each for each in speech), 1.5 * speech[0]])
    difference = speech_probabilities(samples) - silero_probabilities(samples)
    assert np.abs(difference).max() < 1e-4


def silero_probabilities(samples: Samples) -> npt.NDArray[np.float32]:
    """As the package silero-vad has them: one run over all frames."""
    package = find_spec("silero_vad")
    assert package is not None
    assert package.origin is not None
    graph = Path(package.origin).parent / "data" / "silero_vad_16k_sequence.onnx"
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    padded = np.pad(samples, (CONTEXT, -len(samples) % FRAME))
    frames = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT + FRAME)[::FRAME]
    state = np.zeros(STATE_SHAPE, np.float32)
    probabilities = session.run(None, {"input": np.ascontiguousarray(frames), "h": state, "c": state})[0]
    return np.asarray(probabilities, np.float32)


def test_speech_goes_on_at_a_little_less_than_what_starts_it() -> None:
    probabilities = np.array([0.4, 0.5, 0.4, 0.34, 0.4, 0.6], np.float32)
    assert is_speech(probabilities, 0.5) == [False, True, True, False, False, True]


def test_the_detector_needs_no_torch_and_keeps_no_records_for_its_maker(tmp_path: Path) -> None:
    """onnxruntime leaves an identifier and a database in the home folder where its reports are on."""
    code = (
        "import sys, numpy, asr_server.audio.voice as voice;"
        "voice.speech_probabilities(numpy.zeros(1000, numpy.float32));"
        "sys.exit('torch' in sys.modules)"
    )
    hidden = ("ORT_DISABLE_TELEMETRY", "CI", "ORT_RUNNING_UNIT_TESTS")  # each of which turns them off
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    child = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment | {"HOME": str(tmp_path)}
    )
    assert child.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("speech_s", "begins_s"),
    [
        ([(PAUSE_S, 2.0)], PAUSE_S),
        ([(0.96, 2.0)], None),
        ([(0.5, 2.0), (2.0 + PAUSE_S, 3.5)], 2.0 + PAUSE_S),
        ([(0.0, 4.0)], None),
        ([], None),
    ],
)
def test_speech_is_missed_behind_a_pause(speech_s: list[tuple[float, float]], begins_s: float | None) -> None:
    assert first_missed_s(speech_s) == begins_s


def test_no_samples_are_no_speech() -> None:
    nothing = np.empty(0, np.float32)
    assert possible_and_certain_s(frames_of(nothing)) == ([], [])


@pytest.mark.parametrize(("num_samples", "num_pushed"), [(0, 0), (1, 0), (511, 0), (512, 1), (513, 1)])
def test_a_frame_that_has_begun_is_scored_at_the_end(num_samples: int, num_pushed: int) -> None:
    detector = VoiceDetector()
    assert len(detector.push(np.zeros(num_samples, np.float32))) == num_pushed
    assert len(detector.finish()) == (num_samples % 512 > 0)


@pytest.mark.parametrize("has_vnni", [True, False])
def test_weights_are_unsigned_where_sums_overflow(has_vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        voice_module, "cpu_flags", lambda: frozenset([*VNNI_FLAGS][:1] if has_vnni else ["avx2"])
    )
    options: onnxruntime.SessionOptions = load_onnx(DETECTOR).get_session_options()
    if has_vnni:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry("session.x64quantprecision")
    else:
        assert options.get_session_config_entry("session.x64quantprecision") == "1"
