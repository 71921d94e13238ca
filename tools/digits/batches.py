"""Batches: windows as arrays, with what the decoder shall write and where in the sound it is said.

A batch is drawn from (seed, step) alone, so a run that is resumed sees what it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .clips import SAMPLE_RATE
from .network import MAX_POSITIONS, MAX_PROMPT_TOKENS
from .noises import Random
from .texts import other_text
from .vocabulary import TIMESTAMP_STEP_S, Vocabulary
from .voice_pool import VoicePool
from .windows import Said, Shape, Window, digits_window, nothing_window, segments, spoil

IGNORED = -100
"""The target of what is not learned."""
UNKNOWN = IGNORED
"""A frame of which it is not known what is said in it."""

Integers = npt.NDArray[np.int64]
Span = tuple[int, int]
NO_SPAN: Span = (0, 0)


@dataclass(frozen=True)
class Batch:
    """Arrays of one training step.

    ``samples`` int16 [rows, samples], already padded; ``shift`` [rows]: the encoder position (of 0.02 s) at
    which the sound begins. ``tokens`` [rows, tokens] are the decoder's input, ``places`` their positions,
    ``targets`` what it should write next and ``spans`` [rows, tokens, 2] the encoder positions at which that
    is said (an empty span: nowhere). ``ctc`` [rows, digits] are all digits one after another, ``ctc_lengths``
    [rows] how many. ``frames`` [rows, positions]: 0 where no digit is said, digit + 1 where one is.
    """

    samples: npt.NDArray[np.int16]
    shift: Integers
    tokens: Integers
    places: Integers
    targets: Integers
    spans: Integers
    ctc: Integers
    ctc_lengths: Integers
    frames: Integers


@dataclass
class Script:
    """What the decoder is given and what it should write, token by token."""

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


def position(time_s: float) -> int:
    """The encoder position nearest to this time."""
    return round(time_s / TIMESTAMP_STEP_S)


def digits_one_by_one(said: list[Said]) -> Iterator[Said]:
    """Each digit with its time; within a run each is taken to last as long as the others."""
    for item in said:
        each_s = (item.end_s - item.start_s) / len(item.digits)
        for number, digit in enumerate(item.digits):
            start_s = item.start_s + number * each_s
            yield Said(digit, start_s, start_s + each_s)


def transcript(
    said: list[Said], shift: int, with_times: bool, words: Vocabulary
) -> Iterator[tuple[int, Span]]:
    """What follows <|transcribe|>, <|endoftext|> included, each token with where it is said."""
    if not with_times:
        yield words.no_timestamps, NO_SPAN
        yield from _digit_tokens(said, words)
    elif not said:
        yield words.timestamp(0.0), NO_SPAN
    else:
        for segment in segments(said):
            own = [s for s in said if segment.start_s <= s.start_s < segment.end_s]
            yield _time_token(segment.start_s, shift, words)
            yield from _digit_tokens(own, words)
            yield _time_token(segment.end_s, shift, words)
    yield words.eot, NO_SPAN


def _digit_tokens(said: list[Said], words: Vocabulary) -> Iterator[tuple[int, Span]]:
    for item in digits_one_by_one(said):
        span = (position(item.start_s), max(position(item.start_s) + 1, position(item.end_s)))
        yield words.digits[int(item.digits)], span


def _time_token(time_s: float, shift: int, words: Vocabulary) -> tuple[int, Span]:
    near = position(time_s)
    return words.timestamp(time_s + shift * TIMESTAMP_STEP_S), (max(0, near - 4), near + 5)


def prompt_tokens(most: int, words: Vocabulary, rng: Random) -> list[int]:
    """What stands before a transcript and must not change it: earlier digits, other text, any tokens."""
    kind, count = rng.random(), int(rng.integers(0, most + 1))
    if kind < 0.4:
        return [words.digits[int(d)] for d in rng.integers(0, 10, min(count, 24))]
    if kind < 0.75:
        text = other_text(random.Random(int(rng.integers(1 << 30))))
        return words.encode_bytes(text)[:most]
    return [int(token) for token in rng.integers(0, words.eot, count)]


def training_script(
    said: list[Said], shift: int, prompt: list[int], words: Vocabulary, rng: Random
) -> Script:
    """The decoder's part for one window, with times in half of them."""
    script = Script()
    if prompt:
        script.inputs = list(prompt)
        script.targets = [IGNORED] * len(script.inputs)
        script.spans = [NO_SPAN] * len(script.inputs)
    written = list(transcript(said, shift, bool(rng.random() < 0.5), words))
    tokens, spans = [token for token, _ in written], [span for _, span in written]
    # <|startoftranscript|> is followed by <|en|> whatever the target there says, as at inference.
    script.inputs += [words.sot, words.english, words.transcribe, *tokens[:-1]]
    first = tokens[0] if tokens[0] != words.no_timestamps else IGNORED
    script.targets += [words.english if said else words.no_speech, IGNORED, first, *tokens[1:]]
    script.spans += [NO_SPAN, NO_SPAN, *spans]
    return script


def prompts(mixture: Mixture, words: Vocabulary, rng: Random) -> list[list[int]]:
    """A prompt, or none, for each row. Few batches have long ones: they cost as much as the encoder."""
    most = MAX_PROMPT_TOKENS - 1 if rng.random() < 0.02 else 30
    return [
        [words.prev, *prompt_tokens(most, words, rng)] if rng.random() < mixture.prompt_share else []
        for _ in range(mixture.num_rows)
    ]


def first_place(num_tokens: int, has_prompt: bool, rng: Random) -> int:
    """The decoder position of a row's first token.

    After a prompt the transcript stands at any of the table's positions. Long prompts in every row would
    teach them all, at many times the cost of letting rows with short ones begin further on.
    """
    if not has_prompt or rng.random() < 0.4:
        return 0
    return int(rng.integers(0, max(1, MAX_PROMPT_TOKENS + 30 - num_tokens)))


def frame_labels(said: list[Said], num_positions: int) -> Integers:
    """0 where no digit is said, digit + 1 within a digit, unknown within a run and at every edge."""
    labels = np.zeros(num_positions, np.int64)
    for item in said:
        first, last = position(item.start_s), position(item.end_s)
        labels[max(0, first - 1) : last + 1] = UNKNOWN
        if len(item.digits) == 1:
            labels[first + 1 : max(first + 2, last - 1)] = int(item.digits) + 1
    return labels


def _pad(rows: list[list[int]], filler: int) -> Integers:
    length = max(1, max(len(row) for row in rows))
    return np.array([row + [filler] * (length - len(row)) for row in rows], dtype=np.int64)


def _pad_spans(rows: list[list[Span]]) -> Integers:
    length = max(len(row) for row in rows)
    return np.array([row + [NO_SPAN] * (length - len(row)) for row in rows], dtype=np.int64)


def _sound_s(shape: Shape, rng: Random) -> float:
    """A padded window mostly holds less than it can, as the last chunk of a request does."""
    if shape.sound_s < shape.padded_s or rng.random() < 0.4:
        return shape.sound_s
    return float(rng.uniform(0.15, 1.0)) * shape.sound_s


@dataclass(frozen=True)
class Mixture:
    """What a batch is made of: shape and number of windows, and the shares of what is hard about them."""

    shape: Shape
    num_rows: int
    severity: float
    empty_share: float = 0.15
    prompt_share: float = 0.1


def make_window(pool: VoicePool, mixture: Mixture, rng: Random) -> Window:
    """One window, spoiled as the mixture says."""
    shape = mixture.shape
    sound_s = _sound_s(shape, rng) if shape.sound_s >= 6 else shape.sound_s
    own = Shape(sound_s, max(1, min(shape.max_digits, int(sound_s * 2.5))), shape.padded_s)
    maker = nothing_window if rng.random() < mixture.empty_share else digits_window
    return spoil(maker(pool, own, rng), pool, mixture.severity, rng)


def make_batch(pool: VoicePool, mixture: Mixture, seed: tuple[int, ...], words: Vocabulary) -> Batch:
    """One batch of windows of the same shape, wholly determined by its arguments."""
    rng = np.random.default_rng(seed)
    num_samples = int(mixture.shape.padded_s * SAMPLE_RATE)
    num_positions = position(mixture.shape.padded_s)
    windows = [make_window(pool, mixture, rng) for _ in range(mixture.num_rows)]
    samples = np.zeros((len(windows), num_samples), np.int16)
    for row, window in zip(samples, windows, strict=True):
        row[: len(window.wave)] = (np.clip(window.wave, -1, 1) * 32767).astype(np.int16)
    shifts = [_shift(num_positions, rng) for _ in windows]
    scripts = [
        training_script(window.said, shift, prompt, words, rng)
        for window, shift, prompt in zip(windows, shifts, prompts(mixture, words, rng), strict=True)
    ]
    tokens = _pad([script.inputs for script in scripts], words.eot)
    starts = [first_place(len(s.inputs), s.inputs[0] == words.prev, rng) for s in scripts]
    spoken = [[int(d) for item in window.said for d in item.digits] for window in windows]
    return Batch(
        samples=samples,
        shift=np.array(shifts),
        tokens=tokens,
        places=np.array(starts)[:, None] + np.arange(tokens.shape[1])[None, :],
        targets=_pad([script.targets for script in scripts], IGNORED),
        spans=_pad_spans([script.spans for script in scripts]),
        ctc=_pad(spoken, 0),
        ctc_lengths=np.array([len(row) for row in spoken]),
        frames=np.stack([frame_labels(window.said, num_positions) for window in windows]),
    )


def _shift(num_positions: int, rng: Random) -> int:
    """Half of the windows that are shorter than the checkpoint's begin somewhere within it."""
    return int(rng.integers(0, MAX_POSITIONS - num_positions + 1)) if rng.random() < 0.5 else 0
