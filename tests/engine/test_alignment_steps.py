"""Token times of a small model, against the method written down plainly for one chunk at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asr_server.core import ChunkId, ChunkResult, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.alignment import PendingAlignment, TokenTimesThread, first_frames, normalise
from asr_server.engine.config import EngineConfig
from asr_server.engine.runner import Runner, StepPlan
from asr_server.engine.slots import SlotStart
from asr_server.model.rows import rows_of
from tests.engine.small import PROMPT, SIZES, SPECIALS, TOKENIZER, clip, small
from tests.vocabulary import words

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
        keys = cache.audio(layer, [0])[0][0]
        for head in heads:
            weights = (queries[layer][0, :, head] @ keys[head, :, :num_positions]).softmax(-1).numpy()
            above = (weights - weights.mean(0)) / weights.std(0)
            attention.append(weights[len(PROMPT) : len(PROMPT) + len(text) + 1])
            gains.append(median_of_seven(above[len(PROMPT) : len(PROMPT) + len(text) + 1]))
    first = first_frames(np.mean(gains, 0)).tolist()
    peaks = []
    for row, (start, end) in enumerate(zip(first, [*first[1:], num_positions], strict=True)):
        own = np.mean(attention, 0)[row, start : max(end, start + 1)]
        peaks.append(0.02 * (start + int(own.argmax()) + 0.5))
    return [0.02 * frame for frame in first], peaks[:-1]


def median_of_seven(rows: Any) -> Any:
    padded = np.pad(rows, ((0, 0), (3, 3)), mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 7, -1), -1)


def check(found: ChunkResult, number: int, text: tuple[int, ...], num_positions: int) -> None:
    times_s, peaks_s = expected(number, text, num_positions)
    assert found.token_times_s == pytest.approx(times_s)
    assert found.token_peaks_s == pytest.approx(peaks_s)


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


def test_pauses_come_along_with_the_times(runner: Runner) -> None:
    chunk, result = finished(0, (START, *words("47"), START + 60))
    chunk.pauses = np.array([[0.1, 0.25], [0.5, 0.75]])
    (found,) = align(runner, (chunk, result))
    assert found.pauses_s == ((0.1, 0.25), (0.5, 0.75))


@pytest.mark.parametrize(("number", "num_positions"), [(2, 4), (3, 2)])
def test_more_tokens_than_positions_share_them(number: int, num_positions: int, runner: Runner) -> None:
    text = words("47113")
    (found,) = align(runner, finished(number, (START, *text, START + 1)))
    assert len(found.token_times_s) == 6
    assert len(found.token_peaks_s) == 5
    assert list(found.token_times_s) == sorted(found.token_times_s)
    assert found.token_times_s[0] == 0.0
    assert max(found.token_times_s) <= 0.02 * num_positions
    assert max(found.token_peaks_s) < 0.02 * num_positions


def test_a_text_that_leaves_no_room_for_its_end_has_the_last_time_twice(runner: Runner) -> None:
    """The text is fed behind one token more than it was decoded behind."""
    text = words("12345678901234567890123456789012345678901234567890123456")
    assert len(PROMPT) + len(text) == SIZES.text_positions - 1
    (found,) = align(runner, finished(1, (START, *text)))
    assert len(found.token_times_s) == len(text) + 1
    (longer,) = align(runner, finished(1, (START, *text, *words("7"))))
    assert len(longer.token_times_s) == len(text) + 2
    assert longer.token_times_s[-1] == longer.token_times_s[-2]
    assert longer.token_peaks_s[-1] >= longer.token_peaks_s[-2]


def test_a_new_text_clears_what_an_alignment_has_written(runner: Runner) -> None:
    """It feeds more tokens than were decoded; they would be masked, but NaN times zero is NaN."""
    align(runner, finished(0, (START, *words("47113"), START + 60)))
    num_fed = len(PROMPT) + 1 + 5 + 1
    for tensor in (runner.cache.keys, runner.cache.values):
        assert tensor[:, 0, :, :num_fed].all()
        tensor[:, 0, :, :num_fed] = math.nan
    runner.prefill([0], [PROMPT[:2]], 0)
    runner.start([SlotStart(0, PROMPT, OPTIONS)])
    for tensor in (runner.cache.keys, runner.cache.values):
        assert tensor[:, 0].isfinite().all()
    assert math.isfinite(runner.decode(StepPlan(1, 3)).array()[1, 0])


# -- The thread -----------------------------------------------------------------------------------------


class Gated:
    """Sums of a device that are there at once; the times wait for a word."""

    def __init__(self, number: int, gate: threading.Event) -> None:
        chunk, result = finished(0, (START, number, START + 60))
        self.pending: Any = PendingAlignment(chunk, result, 1, self)  # type: ignore[arg-type]
        self.gate, self.reads = gate, list[str]()

    def is_ready(self) -> bool:
        return False

    def array(self) -> Any:
        self.reads.append(threading.current_thread().name)
        if len(self.reads) > 1:
            assert self.gate.wait(60)
        return np.ones((2, 2, 10))


def test_times_are_found_in_a_thread_and_come_in_order() -> None:
    gates = [threading.Event(), threading.Event()]
    first, second = (Gated(number, gate) for number, gate in enumerate(gates, 40))
    thread = TokenTimesThread()
    for each in (first, second):
        assert not each.pending.is_ready()
        thread.add(each.pending)
        assert each.reads[0] == threading.current_thread().name, "only the engine's thread waits for a device"
    assert len(thread) == 2
    assert list(thread.take(waits=False)) == []
    gates[1].set()
    assert list(thread.take(waits=False)) == []
    gates[0].set()
    found = list(thread.take(waits=True))
    assert [result.tokens[1] for _, result in found] == [40, 41]
    assert [chunk for chunk, _ in found] == [first.pending.chunk, second.pending.chunk]
    assert first.reads[1].startswith("token-times")
    assert len(thread) == 0
    thread.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.add(first.pending)
    assert TOKENIZER.is_text(40)


def test_the_times_of_one_text_are_waited_for_or_not() -> None:
    gate, thread = threading.Event(), TokenTimesThread()
    only = Gated(40, gate)
    assert list(thread.take(waits=True)) == [], "nothing has begun"
    thread.add(only.pending)
    assert list(thread.take(waits=False)) == []
    gate.set()
    assert [chunk for chunk, _ in thread.take(waits=True)] == [only.pending.chunk]
    thread.close()


def test_attention_is_normalised_over_the_tokens_of_each_head() -> None:
    attention = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    attention[1, :, 2] = 0.25
    expected = (attention.numpy() - attention.numpy().mean(1, keepdims=True)) / np.maximum(
        attention.numpy().std(1, keepdims=True), 1e-30
    )
    torch.testing.assert_close(normalise(attention), torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_samples", "expected"), [(100, 1), (639, 1), (640, 2), (48_000, 150), (99_000, 150)]
)
def test_a_text_is_laid_along_one_position_at_least_and_along_the_window_at_most(
    num_samples: int, expected: int, runner: Runner
) -> None:
    assert runner._aligner._num_positions(num_samples) == expected
