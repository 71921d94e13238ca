"""The curve of a run: errors of the encoder's CTC head and of the decoder, each alone, over the steps."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from .clips import SAMPLE_RATE, Clip, ClipStore
from .losses import Learner
from .network import NUM_FRAME_LAYERS, WINDOW_S, encode
from .sequences import Example, digit_errors, sequences
from .speakers import SPEAKERS
from .voices import is_held_out

_NUM_SEQUENCES = 60
_MAX_TOKENS = 40


@dataclass(frozen=True)
class JudgedSet:
    """Windows of one kind of voices, and what is said in them."""

    name: str
    samples: npt.NDArray[np.float32]  # [windows, samples]
    digits: list[str]


def judged_set(name: str, clips: Iterable[Clip], seed: int) -> JudgedSet:
    """Sequences of three to eight digits that fit a window."""
    drawn = sequences(clips, 3 * _NUM_SEQUENCES, seed, long_pauses=False, max_digits=8)
    fitting = [e for e in drawn if len(e.wave) <= WINDOW_S * SAMPLE_RATE][:_NUM_SEQUENCES]
    return JudgedSet(name, np.stack([_padded(e) for e in fitting]), [e.digits for e in fitting])


def _padded(example: Example) -> npt.NDArray[np.float32]:
    return np.pad(example.wave, (0, WINDOW_S * SAMPLE_RATE - len(example.wave)))


def judged_sets(cache: Path) -> list[JudgedSet]:
    """A voice that trains the model, and the synthesised voices that do not."""
    trained = cache / "recorded" / f"{SPEAKERS[0]}.npz"
    sets = [judged_set("trained", ClipStore.load(trained).clips, seed=21)] if trained.exists() else []
    return [*sets, judged_set("left-out", held_out_clips(cache), seed=22)]


def held_out_clips(cache: Path, files: str = "*.npz") -> list[Clip]:
    """Clips of the synthesised voices that never train anything."""
    paths = sorted((cache / "synthesised").glob(files))
    return [clip for path in paths for clip in ClipStore.load(path).clips if is_held_out(clip.voice)]


@torch.inference_mode()
def judge(learner: Learner, windows: JudgedSet, frames_only: bool) -> dict[str, float]:
    """Digit error rates of the CTC head, of the decoder (without times) and of the frame head, all greedy.

    While only the encoder's first layers learn, there is nothing but the frame head to judge.
    """
    features = learner.log_mel(torch.from_numpy(windows.samples))
    shift, num_layers = (
        torch.zeros(len(features), dtype=torch.long),
        NUM_FRAME_LAYERS if frames_only else None,
    )
    encoded = encode(learner.network, features, shift, num_layers)
    readings = {
        "ctc": None if frames_only else _read_best(learner.ctc_head(encoded)),
        "decoder": None if frames_only else _read_decoder(learner, encoded),
        "frame": _read_best(_smoothed(learner.frame_head(encoded))),
    }
    total = sum(map(len, windows.digits))
    return {
        f"{windows.name} {reader}": sum(map(digit_errors, windows.digits, read)) / total if read else math.nan
        for reader, read in readings.items()
    }


def _smoothed(logits: torch.Tensor) -> torch.Tensor:
    """Means over nine positions: a digit lasts longer, and what flickers within one is none."""
    return nn.functional.avg_pool1d(logits.transpose(1, 2), 9, stride=1, padding=4).transpose(1, 2)


def _read_best(logits: torch.Tensor) -> list[str]:
    best = logits.argmax(dim=-1)
    return [
        "".join(str(label - 1) for label in torch.unique_consecutive(row).tolist() if label) for row in best
    ]


def _read_decoder(learner: Learner, encoded: torch.Tensor) -> list[str]:
    words, network = learner.words, learner.network
    start = [words.sot, words.english, words.transcribe, words.no_timestamps]
    tokens = torch.tensor([start] * len(encoded))
    network.config._attn_implementation = "sdpa"
    for _ in range(_MAX_TOKENS):
        hidden = network.model.decoder(
            input_ids=tokens, encoder_hidden_states=encoded, use_cache=False
        ).last_hidden_state[:, -1]
        logits = network.proj_out(hidden)[:, : words.timestamp_begin]
        tokens = torch.cat([tokens, logits.argmax(dim=-1, keepdim=True)], dim=1)
        if (tokens == words.eot).any(dim=1).all():
            break
    return [words.decode_digits(_until(row, words.eot)) for row in tokens[:, len(start) :].tolist()]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def append_to_curve(path: Path, step: int, losses: dict[str, float], rates: dict[str, float]) -> None:
    """One line of the curve."""
    row = {"step": step, **{k: round(v, 4) for k, v in {**losses, **rates}.items()}}
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)
