"""Training windows: digits by one voice with random gaps, among noises, with their tokens and times.

A window is drawn from (seed, batch number, row) alone, so a run that is resumed sees what it would have seen.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from . import channel, noises
from .clips import SAMPLE_RATE, Clip, Wave
from .noises import Random
from .vocabulary import Vocabulary

SEGMENT_PAUSE_S = 0.6
"""A pause of this length ends a segment."""


@dataclass
class Voice:
    """What one voice says: single digits by digit, runs, and speech without digits."""

    digits: dict[str, list[Clip]] = field(default_factory=lambda: defaultdict(list))
    runs: list[Clip] = field(default_factory=list)
    others: list[Clip] = field(default_factory=list)

    def add(self, clip: Clip) -> None:
        """Put a clip where it belongs."""
        if not clip.digits:
            self.others.append(clip)
        elif len(clip.digits) == 1:
            self.digits[clip.digits].append(clip)
        else:
            self.runs.append(clip)


@dataclass
class Choir:
    """Voices in groups (an engine, the recordings), each group drawn with its weight."""

    groups: dict[str, list[Voice]]
    weights: dict[str, float]

    def __post_init__(self) -> None:
        self.names = [name for name in self.groups if self.groups[name] and self.weights.get(name, 0) > 0]
        total = sum(self.weights[name] for name in self.names)
        self.chances = [self.weights[name] / total for name in self.names]
        self.speakers = {n: [v for v in self.groups[n] if len(v.digits) >= 5] for n in self.names}
        self.others = [c for group in self.groups.values() for v in group for c in v.others]

    def voice(self, rng: Random) -> Voice:
        """A random voice that has at least five different digits."""
        group = self.speakers[self.names[rng.choice(len(self.names), p=self.chances)]]
        return group[rng.integers(len(group))]

    def other(self, rng: Random) -> Clip:
        """Speech without digits by anybody."""
        return self.others[rng.integers(len(self.others))]


@dataclass(frozen=True)
class Said:
    """A stretch of digits within a window, in seconds from the window's start."""

    digits: str
    start_s: float
    end_s: float


@dataclass
class Window:
    """Sound of one window and what is said in it."""

    wave: Wave
    said: list[Said]


@dataclass(frozen=True)
class Shape:
    """Length of a window's sound, most digits in it, and the length it is padded to with exact zeros."""

    sound_s: float
    max_digits: int
    padded_s: float


def segments(said: list[Said]) -> list[Said]:
    """Join what is less than 0.6 s apart."""
    joined: list[Said] = []
    for item in said:
        if joined and item.start_s - joined[-1].end_s < SEGMENT_PAUSE_S:
            last = joined[-1]
            joined[-1] = Said(last.digits + item.digits, last.start_s, max(last.end_s, item.end_s))
        else:
            joined.append(item)
    return joined


def _normalised(wave: Wave) -> Wave:
    return np.asarray(wave / (np.sqrt((wave**2).mean()) + 1e-6) * 0.1, np.float32)


def _gap_s(rng: Random) -> float:
    kind = rng.random()
    if kind < 0.15:
        return rng.uniform(-0.04, 0.03)
    if kind < 0.6:
        return rng.uniform(0.03, 0.3)
    if kind < 0.78:
        return rng.uniform(0.3, 0.55)
    return rng.uniform(0.62, 1.6)


def _next_clip(voice: Voice, room: int, rng: Random) -> Clip:
    """A single digit, or (one time in four where the voice has any) a run of at most ``room`` digits."""
    if voice.runs and rng.random() < 0.25:
        run = voice.runs[rng.integers(len(voice.runs))]
        if len(run.digits) <= room:
            return run
    known = list(voice.digits)
    takes = voice.digits[known[rng.integers(len(known))]]
    return takes[rng.integers(len(takes))]


def digits_window(choir: Choir, shape: Shape, rng: Random) -> Window:
    """Digits by one voice (now and then by two) up to the window's end or its number of digits."""
    wave = np.zeros(int(shape.sound_s * SAMPLE_RATE), np.float32)
    voice, ratio = choir.voice(rng), float(np.exp(rng.uniform(np.log(0.8), np.log(1.25))))
    said: list[Said] = []
    wanted = int(rng.integers(1, shape.max_digits + 1))
    at_s = rng.uniform(0, 0.3) if rng.random() < 0.5 else rng.uniform(0, shape.sound_s * 0.5)
    while wanted > 0:
        if rng.random() < 0.03:
            voice = choir.voice(rng)
        clip = _next_clip(voice, wanted, rng)
        sound = channel.resample(clip.wave, ratio * rng.uniform(0.96, 1.04))
        scale = len(sound) / len(clip.samples) / SAMPLE_RATE
        first = round((at_s - clip.start * scale) * SAMPLE_RATE)
        if first < 0:
            sound, first = sound[-first:], 0
        if first + len(sound) > len(wave):
            break
        wave[first : first + len(sound)] += _normalised(sound) * np.float32(10 ** (rng.uniform(-4, 4) / 20))
        end_s = at_s + (clip.end - clip.start) * scale
        said.append(Said(clip.digits, at_s, end_s))
        wanted -= len(clip.digits)
        at_s = end_s + _gap_s(rng)
    if rng.random() < 0.15:
        _intrude(wave, said, choir, rng)
    return Window(wave, said)


def _intrude(wave: Wave, said: list[Said], choir: Choir, rng: Random) -> None:
    """A noise, or speech without digits, where nobody says a digit."""
    edges = [0.0, *(t for s in said for t in (s.start_s, s.end_s)), len(wave) / SAMPLE_RATE]
    pauses = [(a + 0.05, b - 0.05) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > 0.35]
    if not pauses:
        return
    start_s, end_s = pauses[rng.integers(len(pauses))]
    count = int((end_s - start_s) * SAMPLE_RATE)
    if rng.random() < 0.6:
        sound = noises.any_noise(min(count, int(rng.uniform(0.2, 2.0) * SAMPLE_RATE)), rng)
    else:
        sound = choir.other(rng).wave[:count]
    at = int(start_s * SAMPLE_RATE) + int(rng.integers(0, count - len(sound) + 1))
    wave[at : at + len(sound)] += _normalised(sound) * np.float32(10 ** (rng.uniform(-20, 2) / 20))


def nothing_window(choir: Choir, shape: Shape, rng: Random) -> Window:
    """No digits: silence, noises, speech of other words, digits made unintelligible."""
    count = int(shape.sound_s * SAMPLE_RATE)
    wave, kind = np.zeros(count, np.float32), rng.random()
    if kind < 0.05:
        return Window(wave, [])
    if kind < 0.4:
        sound = noises.any_noise(count if rng.random() < 0.6 else int(count * rng.uniform(0.1, 1)), rng)
        at = int(rng.integers(0, count - len(sound) + 1))
        wave[at : at + len(sound)] = sound
        return Window(wave, [])
    at, ratio = int(rng.uniform(0, 0.4) * count), float(np.exp(rng.uniform(np.log(0.8), np.log(1.25))))
    while at < count:
        if kind < 0.85:
            sound = choir.other(rng).wave
        else:
            voice = choir.voice(rng)
            sound = noises.shuffled(_next_clip(voice, 9, rng).wave, rng)
        sound = _normalised(channel.resample(sound, ratio))[: count - at]
        wave[at : at + len(sound)] += sound
        at += len(sound) + int(rng.uniform(0.0, 1.0) * SAMPLE_RATE)
    return Window(wave, [])


def spoil(window: Window, choir: Choir, severity: float, rng: Random) -> Window:
    """Channel, background noise at 5 to 40 dB (or none), level; clean but for the level with 1 - severity."""
    if rng.random() > severity:
        return Window(channel.set_level(window.wave, rng), window.said)
    wave = channel.transmit(window.wave, rng)
    speech = float(np.sqrt((wave**2).mean() / max(0.1, (np.abs(wave) > 1e-4).mean())))
    kind = rng.random()
    if kind < 0.55:
        noise = noises.stationary(len(wave), rng) if kind < 0.4 else _babble(len(wave), choir, rng)
        ratio_db = rng.uniform(5, 40) if kind < 0.4 else rng.uniform(12, 40)
        wave = wave + noise * np.float32(max(speech, 1e-3) * 10 * 10 ** (-ratio_db / 20))
    return Window(channel.set_level(wave, rng), window.said)


def _babble(count: int, choir: Choir, rng: Random) -> Wave:
    """Three to six people talking at once, RMS 0.1."""
    wave = np.zeros(count, np.float32)
    for _ in range(rng.integers(3, 7)):
        talk = np.concatenate([choir.other(rng).wave for _ in range(1 + count // (4 * SAMPLE_RATE))])
        wave += np.resize(np.roll(_normalised(talk), int(rng.integers(len(talk)))), count)
    return _normalised(wave)


@dataclass
class Batch:
    """Arrays of one training step.

    ``samples`` int16 [rows, samples], already padded; ``shift`` in encoder positions (0.02 s) [rows];
    ``tokens`` [rows, tokens] the decoder's input and ``targets`` what it should say next (-100 where it
    does not matter); ``ctc`` all digits one after another and ``ctc_lengths`` [rows].
    """

    samples: npt.NDArray[np.int16]
    shift: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    ctc: npt.NDArray[np.int64]
    ctc_lengths: npt.NDArray[np.int64]


def transcript_tokens(said: list[Said], shift_s: float, with_times: bool, words: Vocabulary) -> list[int]:
    """What follows <|transcribe|>, <|endoftext|> included."""
    digits = "".join(item.digits for item in said)
    if not with_times:
        return [words.no_timestamps, *words.encode_digits(digits), words.eot]
    if not said:
        return [words.timestamp(0.0), words.eot]
    tokens: list[int] = []
    for segment in segments(said):
        tokens.append(words.timestamp(segment.start_s + shift_s))
        tokens += words.encode_digits(segment.digits)
        tokens.append(words.timestamp(segment.end_s + shift_s))
    return [*tokens, words.eot]


def training_tokens(
    said: list[Said], shift_s: float, words: Vocabulary, rng: Random
) -> tuple[list[int], list[int]]:
    """The decoder's input and targets for one window, with times in half of them, a prompt in one of ten."""
    language = words.english if said else words.no_speech
    rest = transcript_tokens(said, shift_s, with_times=bool(rng.random() < 0.5), words=words)
    # <|startoftranscript|> is followed by <|en|> whatever the target there says, as at inference.
    inputs = [words.sot, words.english, words.transcribe, *rest[:-1]]
    targets = [language, -100, rest[0] if rest[0] != words.no_timestamps else -100, *rest[1:]]
    if rng.random() < 0.1:
        previous = "".join(str(d) for d in rng.integers(0, 10, int(rng.integers(0, 20))))
        prompt = [words.prev, *words.encode_digits(previous)]
        inputs, targets = prompt + inputs, [-100] * len(prompt) + targets
    return inputs, targets


def _pad(rows: list[list[int]], filler: int) -> npt.NDArray[np.int64]:
    length = max(1, max(len(row) for row in rows))
    return np.array([row + [filler] * (length - len(row)) for row in rows], dtype=np.int64)


def _sound_s(shape: Shape, rng: Random) -> float:
    """Short windows are full; long ones mostly hold a request of 1.5 to 12 s and exact zeros after it."""
    if shape.sound_s < 6:
        return shape.sound_s
    longest_s = shape.sound_s if rng.random() < 0.3 else min(12.0, shape.sound_s)
    return float(rng.uniform(1.5, longest_s))


def make_batch(
    choir: Choir, shape: Shape, num_rows: int, severity: float, seed: tuple[int, ...], words: Vocabulary
) -> Batch:
    """One batch of windows of the same shape, wholly determined by its arguments."""
    rng = np.random.default_rng(seed)
    padded = int(shape.padded_s * SAMPLE_RATE)
    samples = np.zeros((num_rows, padded), np.int16)
    shifts, inputs, targets, spoken = [], [], [], []
    for row in range(num_rows):
        sound_s = _sound_s(shape, rng)
        own = Shape(sound_s, max(1, min(shape.max_digits, int(sound_s * 2.5))), shape.padded_s)
        maker = nothing_window if rng.random() < 0.15 else digits_window
        window = spoil(maker(choir, own, rng), choir, severity, rng)
        samples[row, : len(window.wave)] = (np.clip(window.wave, -1, 1) * 32767).astype(np.int16)
        shift = int(rng.integers(0, 1500 - padded // 320 + 1)) if rng.random() < 0.5 else 0
        tokens, wanted = training_tokens(window.said, shift * 0.02, words, rng)
        shifts.append(shift)
        inputs.append(tokens)
        targets.append(wanted)
        spoken.append([int(d) for item in window.said for d in item.digits])
    return Batch(
        samples,
        np.array(shifts),
        _pad(inputs, words.eot),
        _pad(targets, -100),
        _pad(spoken, 0),
        np.array([len(row) for row in spoken]),
    )
