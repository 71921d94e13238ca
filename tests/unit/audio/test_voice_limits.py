"""What the detector is given: how samples are evened, and which thumps are turned down."""

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import pytest

from asr_server.audio import voice
from asr_server.audio.voice import (
    DETECTOR,
    VoiceDetector,
    _evened,
    _without_bursts,
    holds_speech,
    load_onnx,
    possible_and_certain_speech_s,
)
from asr_server.core import Samples
from asr_server.machine import VNNI_FLAGS

BLOCK = 160


def blocks(rest: float, burst: float, num_bursts: int = 1) -> Samples:
    """A hundred blocks whose sign changes at each sample, some of them from the fiftieth on louder."""
    levels = np.full(100, rest)
    levels[50 : 50 + num_bursts] = burst
    signs = np.where(np.arange(100 * BLOCK) % 2, -1, 1)
    return (np.repeat(levels, BLOCK) * signs).astype(np.float32)


@pytest.mark.parametrize(
    ("rest", "burst", "num_bursts", "is_turned_down"),
    [
        *((0.01, 0.201, 1, True), (0.01, 0.199, 1, False)),
        *((0.0011, 0.5, 1, True), (0.0009, 0.5, 1, False)),
        *((0.01, 0.5, 19, True), (0.01, 0.5, 20, False)),
    ],
)
def test_a_burst_is_twenty_times_as_loud_as_four_fifths_of_the_rest(
    rest: float, burst: float, num_bursts: int, is_turned_down: bool
) -> None:
    for sign in (1, -1):
        calm = _without_bursts(sign * blocks(rest, burst, num_bursts))
        assert (calm is not None) == is_turned_down
    assert _without_bursts(np.ones(BLOCK - 1, np.float32)) is None


def test_a_burst_is_turned_down_from_before_it_begins_to_behind_its_end() -> None:
    sound = blocks(0.01, 0.5)
    calm = _without_bursts(np.append(sound, sound[:70]))
    assert calm is not None
    gains = calm / np.append(sound, sound[:70])
    low = slice(50 * BLOCK - BLOCK // 2, 51 * BLOCK + BLOCK // 2)
    assert gains[low] == pytest.approx(0.02, abs=1e-4)
    assert gains[: 49 * BLOCK - BLOCK // 2] == pytest.approx(1)
    assert gains[52 * BLOCK + BLOCK // 2 :] == pytest.approx(1)
    assert gains[49 * BLOCK] == pytest.approx(0.51, abs=0.01)


def test_a_burst_at_an_edge_is_turned_down() -> None:
    for sound in (blocks(0.01, 0.5)[50 * BLOCK :], blocks(0.01, 0.5)[: 51 * BLOCK]):
        calm = _without_bursts(sound)
        assert calm is not None
        assert np.abs(calm).max() == pytest.approx(0.01, abs=1e-4)


def test_samples_get_a_peak_of_three_tenths_but_for_clicks_and_silence() -> None:
    sound = np.full(10_000, 0.01, np.float32)
    sound[:8] = 0.9, -0.9, *[0.02] * 6
    evened = _evened(sound)
    assert (evened[0], evened[1]) == (1, -1)
    assert evened[2:8] == pytest.approx(0.6)
    assert evened[8:] == pytest.approx(0.3)
    assert _evened(np.full(100, 5e-5, np.float32)) == pytest.approx(0.15)
    sound[:12] = 0.02
    assert np.abs(_evened(sound)).max() == pytest.approx(0.3)


def test_no_samples_are_no_speech() -> None:
    nothing = np.empty(0, np.float32)
    assert not holds_speech(nothing)
    assert possible_and_certain_speech_s(nothing) == ([], [])


@pytest.mark.parametrize(("num_samples", "num_pushed"), [(0, 0), (1, 0), (511, 0), (512, 1), (513, 1)])
def test_a_frame_that_has_begun_is_scored_at_the_end(num_samples: int, num_pushed: int) -> None:
    detector = VoiceDetector()
    assert len(detector.push(np.zeros(num_samples, np.float32))) == num_pushed
    assert len(detector.finish()) == (num_samples % 512 > 0)


@pytest.mark.parametrize("has_vnni", [True, False])
def test_weights_are_unsigned_where_sums_overflow(has_vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice, "cpu_flags", lambda: frozenset([*VNNI_FLAGS][:1] if has_vnni else ["avx2"]))
    options: onnxruntime.SessionOptions = load_onnx(DETECTOR).get_session_options()
    if has_vnni:
        with pytest.raises(RuntimeError, match="x64quantprecision"):
            options.get_session_config_entry("session.x64quantprecision")
    else:
        assert options.get_session_config_entry("session.x64quantprecision") == "1"
