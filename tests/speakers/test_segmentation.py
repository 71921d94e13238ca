"""Who speaks in each window, by the real model, beside the published network in float32."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.checkpoint.pickled import read_torch
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.speakers import segmentation
from asr_server.speakers.models import CONVOLUTIONS, FILTERS, speaker_models
from asr_server.speakers.segmentation import CLASSES, NUM_FRAMES, STEP, WINDOW, Floats, segment
from tests.speakers.people import TALK, join, require_models

NUM_WINDOWS = 3


@pytest.fixture(scope="module")
def talk() -> Samples:
    require_models()
    return join([said for _, said in TALK])[0][: WINDOW + (NUM_WINDOWS - 1) * STEP]


def windows_of(samples: Samples) -> list[Samples]:
    return [samples[first * STEP : first * STEP + WINDOW] for first in range(NUM_WINDOWS)]


def filters(weights: dict[str, Tensor]) -> Tensor:
    """[80, 1, 251]: as asteroid-filterbanks' ParamSincFB makes them of its parameters."""
    bank = {name: weights[f"sincnet.conv1d.0.filterbank.{name}"] for name in ("low_hz_", "band_hz_", "n_")}
    low = 50 + bank["low_hz_"].abs()
    high = (low + 50 + bank["band_hz_"].abs()).clamp(50, 8000)
    left, window = bank["n_"].reshape(1, -1), weights["sincnet.conv1d.0.filterbank.window_"].reshape(1, -1)
    even = (torch.sin(high @ left) - torch.sin(low @ left)) / (left / 2) * window
    odd = (torch.cos(low @ left) - torch.cos(high @ left)) / (left / 2) * window
    even = torch.cat([even, 2 * (high - low), even.flip(1)], 1)
    odd = torch.cat([odd, torch.zeros(len(odd), 1), -odd.flip(1)], 1)
    return (torch.cat([even, odd]) / (2 * (high - low)).repeat(2, 1))[:, None]


def published(samples: Samples) -> Floats:
    """[num_frames, 7]: log-probabilities by the network as pyannote.audio's PyanNet has it, in float32."""
    folder = speaker_models()
    assert folder
    state = read_torch(folder / "pytorch_model.bin", "state_dict")
    weights = {name: torch.from_numpy(np.array(value, np.float32)) for name, value in state.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = weights[f"sincnet.{name}.weight"], weights[f"sincnet.{name}.bias"]
        return F.instance_norm(x, weight=weight, bias=bias)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = norm(torch.from_numpy(samples)[None, None], "wav_norm1d")
    x = F.conv1d(x, filters(weights), stride=10).abs()
    for layer in range(3):
        if layer:
            name = f"sincnet.conv1d.{layer}"
            x = F.conv1d(x, weights[f"{name}.weight"], weights[f"{name}.bias"])
        x = F.leaky_relu(norm(F.max_pool1d(x, 3), f"norm1d.{layer}"))
    lstm = torch.nn.LSTM(60, 128, 4, batch_first=True, bidirectional=True)
    lstm.load_state_dict({name[5:]: value for name, value in weights.items() if name.startswith("lstm.")})
    with torch.no_grad():
        x, _ = lstm(x.transpose(1, 2))
        for name in ("linear.0", "linear.1"):
            x = F.leaky_relu(linear(x, name))
        return np.asarray(F.log_softmax(linear(x, "classifier"), -1)[0].numpy(), np.float32)


def differs(one: Floats, other: Floats) -> float:
    """The share of frames in which another class is the likeliest."""
    return float(np.mean(one.argmax(axis=-1) != other.argmax(axis=-1)))


def test_a_frame_is_nobodys_one_persons_or_two_peoples() -> None:
    speaking = [who for count in range(3) for who in combinations(range(3), count)]
    assert CLASSES.tolist() == [[float(person in who) for person in range(3)] for who in speaking]


@pytest.mark.parametrize(
    ("num_samples", "num_windows"),
    [*((0, 1), (160_000, 1), (160_001, 2), (239_920, 2), (239_921, 3), (319_840, 3), (319_841, 4))],
)
def test_a_window_of_ten_seconds_begins_every_five(num_samples: int, num_windows: int) -> None:
    silent = np.full(num_samples, 1e-4, np.float32)
    found = segment(silent)
    assert found.shape == (num_windows, 589, 7)
    assert not found.argmax(axis=-1).any()
    assert np.isneginf(found[:, :, 1:]).all()
    assert not found[:, :, 0].any()


def test_windows_with_sound_share_their_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """On networks that count: of the second window, by whose last sample it is one."""
    filtered, convolved = list[Floats](), list[dict[str, Floats]]()

    class Network:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, _: None, inputs: dict[str, Floats]) -> list[Floats]:
            if self.name == FILTERS:
                filtered.append(inputs["samples"])
                return [np.full((1, 160, 2664), len(filtered), np.float32)]
            if self.name == CONVOLUTIONS:
                convolved.append(inputs)
                return [np.zeros((1, 60, 589), np.float32)]
            return [np.ones((len(inputs["features"]), 589, 7), np.float32)]

    monkeypatch.setattr(segmentation, "load", Network)
    samples = np.zeros(160_001, np.float32)
    samples[-1] = 0.5
    found = segment(samples)
    assert [window.all() for window in found] == [False, True]
    assert [part.shape for part in filtered] == [(1, 80_161)] * 2
    assert [np.flatnonzero(part).tolist() for part in filtered] == [[80_080], [160_000 - 159_840]]
    (inputs,) = convolved
    assert inputs["filtered"].shape == (1, 160, 5325)
    assert np.array_equal(inputs["filtered"][0, 0], np.repeat([1, 2], [2664, 2661]))
    assert inputs["mean"].item() == pytest.approx(0.5 / 160_000)
    assert inputs["variance"].item() == pytest.approx(0.25 / 160_000, rel=1e-3)


@pytest.mark.slow
def test_windows_heard_together_are_what_the_published_network_says_of_each(talk: Samples) -> None:
    found = segment(talk)
    assert found.shape == (NUM_WINDOWS, NUM_FRAMES, 7)
    expected = np.stack([published(window) for window in windows_of(talk)])
    assert np.abs(np.exp(found) - np.exp(expected)).mean() < 0.005  # of weights in 8 bits
    assert differs(found, expected) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "added"), [(0.02, 0.0), (1.0, 0.3)])
def test_neither_loudness_nor_a_constant_offset_changes_who_speaks(
    talk: Samples, factor: float, added: float
) -> None:
    changed = talk * np.float32(factor) + np.float32(added)
    expected = np.stack([published(window) for window in windows_of(changed)])
    assert differs(segment(changed), expected) < 0.02
    assert differs(segment(changed), segment(talk)) < 0.05


@pytest.mark.slow
def test_a_part_of_a_window_is_filled_up_with_silence(talk: Samples) -> None:
    shorter = talk[: WINDOW + SAMPLE_RATE]
    found = segment(shorter)
    assert len(found) == 2
    padded = np.pad(shorter[STEP:], (0, WINDOW - len(shorter[STEP:])))
    assert differs(found[1], published(padded)) < 0.02
    assert len(segment(talk[:WINDOW])) == len(segment(talk[:100])) == 1


def test_nobody_speaks_in_a_window_without_sound_between_others(talk: Samples) -> None:
    recording = talk.copy()
    recording[STEP : STEP + WINDOW] = 0
    found = segment(recording)
    assert not found[1].argmax(axis=-1).any()
    assert found[0].argmax(axis=-1).any()
