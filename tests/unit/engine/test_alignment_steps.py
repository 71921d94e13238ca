"""Token times of a small model, against the method written down plainly for one chunk at a time."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.alignment import first_frames
from asr_server.engine.config import EngineConfig
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart
from asr_server.model.rows import rows_of
from tests.support.audio_cache import whole_audio
from tests.support.tokens import words
from tests.unit.engine.small import PROMPT, SPECIALS, clip, small

OPTIONS = DecodingOptions(language="de", word_timestamps=True)
CLIPS = [clip(1, 1.3), clip(2, 2.9), clip(3, 0.09), clip(4, 0.05)]
START = SPECIALS.timestamp_begin
CONFIG = EngineConfig(device="cpu", num_slots=4, encode_batch=4, compute_workers=1)


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = small()
    runner = Runner(made.model, made.rules, made.tokenizer, CONFIG)
    yield runner
    runner.close()


def finished(
    number: int, tokens: tuple[int, ...], slot: int = 0, reason: Any = "stop"
) -> tuple[ActiveChunk, ChunkResult]:
    chunk = ActiveChunk(ChunkId("a", number), CLIPS[number], OPTIONS, "de", [slot], slot)
    return chunk, ChunkResult(tokens, (), 0.0, 0.0, 0.0, 0.0, "de", reason)


def align(runner: Runner, *texts: tuple[ActiveChunk, ChunkResult]) -> list[ChunkResult]:
    slots = [chunk.slot for chunk, _ in texts]
    runner.encode(slots, slots, [chunk.samples for chunk, _ in texts]).join()
    return [pending.aligned_result() for pending in runner.align(texts)]


@torch.inference_mode()
def expected(number: int, text: tuple[int, ...], num_positions: int) -> tuple[list[float], list[float]]:
    """Return when each token begins and the text ends, and where each token is attended to most."""
    model = small().model
    cache = model.new_cache(1)
    cache.write_audio(0, model.decoder.cross_keys_values(model.encoder(model.log_mel([CLIPS[number]]))))
    tokens = torch.tensor([[*PROMPT, SPECIALS.no_timestamps, *text, SPECIALS.end_of_text]])
    positions = torch.arange(tokens.shape[1])[None]
    rows = rows_of(cache, slice(0, 1), positions, tokens.shape[1])
    queries = list(model.decoder.audio_queries(tokens, positions, rows))
    attention, gains = [], []
    for layer, heads in model.alignment_heads.items():
        keys = whole_audio(cache, layer, 0)[0][0]
        for head in heads:
            weights = (queries[layer][0, :, head] @ keys[head, :, :num_positions]).softmax(-1).numpy()
            above = (weights - weights.mean(0)) / weights.std(0)
            attention.append(weights[len(PROMPT) : len(PROMPT) + len(text) + 1])
            gains.append(median_of_seven(above[len(PROMPT) : len(PROMPT) + len(text) + 1]))
    first = first_frames(np.mean(gains, 0)).tolist()
    onsets = []
    for row, (start, end) in zip(np.mean(attention, 0), pairwise([*first, num_positions]), strict=True):
        peak = start + int(row[start : max(end, start + 1)].argmax())
        around = range(max(0, peak - 25), min(num_positions, peak + 26))
        onset = next(
            at for at in around if row[around.start : at + 1].sum() >= row[list(around)].sum() * 0.25
        )
        before = row[around.start : onset].sum()
        onsets.append(0.02 * (onset + (row[list(around)].sum() * 0.25 - before) / row[onset]))
    return [0.02 * frame for frame in first], onsets[:-1]


def median_of_seven(rows: Any) -> Any:
    padded = np.pad(rows, ((0, 0), (3, 3)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, -1), -1)


def check(found: ChunkResult, number: int, text: tuple[int, ...], num_positions: int) -> None:
    times_s, onsets_s = expected(number, text, num_positions)
    assert found.token_times_s == pytest.approx(times_s)
    assert found.token_onsets_s == pytest.approx(onsets_s, abs=1e-4)


def test_texts_of_all_lengths_are_aligned_beside_each_other(runner: Runner) -> None:
    first, second = words("4711"), words("35")
    texts = [
        finished(0, (START, *first, START + 60), slot=2),
        finished(1, (START, *second, START + 50, START + 50, *first, START + 140), slot=0),
    ]
    long, longer = align(runner, *texts)
    check(long, 0, first, 65)
    check(longer, 1, (*second, *first), 145)


def test_what_is_left_unread_is_not_aligned(runner: Runner) -> None:
    """The audio's tail is read again, from the last segment's end."""
    for end in (50, 40):
        read = (START, *words("47"), START + end)
        (found,) = align(runner, finished(1, (*read, START + end, *words("123")), reason="length"))
        check(found, 1, words("47"), end)


def test_a_new_text_clears_what_an_alignment_has_written(runner: Runner) -> None:
    """It feeds more tokens than were decoded; they would be masked, but NaN times zero is NaN."""
    align(runner, finished(0, (START, *words("47113"), START + 60)))
    num_fed = len(PROMPT) + 1 + 5 + 1
    for tensor in (runner.cache.keys, runner.cache.values):
        assert tensor[:, 0, :, :num_fed].all()
        tensor[:, 0, :, :num_fed] = math.nan
    runner.prefill([0], [PROMPT[:2]], 0)
    runner.branch([0], [SlotStart(0, PROMPT, OPTIONS)])
    for tensor in (runner.cache.keys, runner.cache.values):
        assert tensor[:, 0].isfinite().all()
    assert math.isfinite(runner.decode(StepPlan(1, 3)).array()[1, 0])


Matrix = npt.NDArray[np.float64]


@pytest.mark.parametrize("share_frames", [False, True])
def test_the_path_of_dynamic_time_warping_is_the_best_there_is(share_frames: bool) -> None:
    random = np.random.default_rng(0)
    for num_rows, num_frames in ((1, 1), (1, 5), (3, 3), (3, 5), (4, 6), (5, 5)):
        gain = random.normal(size=(num_rows, num_frames))
        assert first_frames(gain, share_frames).tolist() == _best_path(gain, share_frames)


def test_rows_share_frames_where_there_are_too_few() -> None:
    random = np.random.default_rng(0)
    for num_rows, num_frames in ((4, 1), (5, 4)):
        gain = random.normal(size=(num_rows, num_frames))
        assert first_frames(gain).tolist() == _best_path(gain, share_frames=True)


def _best_path(gain: Matrix, share_frames: bool) -> list[int]:
    """By trying every path."""
    num_rows, num_frames = gain.shape
    best: tuple[float, list[int]] = (-np.inf, [])

    def walk(row: int, frame: int, total: float, first: list[int]) -> None:
        nonlocal best
        total += gain[row, frame]
        if (row, frame) == (num_rows - 1, num_frames - 1) and total > best[0]:
            best = total, first
        for down, right in ((0, 1), (1, 1), *([(1, 0)] if share_frames else [])):
            if row + down < num_rows and frame + right < num_frames:
                walk(row + down, frame + right, total, [*first, frame + right] if down else first)

    walk(0, 0, 0.0, [0])
    return best[1]
