"""The examination: digit error rates, rejection and times.

Only voices that never trained the examined model are heard, except where a line says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from scipy import signal
from tqdm import tqdm

from asr_server.core import ChunkId, DecodingOptions, Result, Submit
from asr_server.engine import Engine, EngineConfig

from . import channel, noises
from .clips import SAMPLE_RATE, Clip, Wave
from .mixing import Said, segments
from .noises import Random
from .texts import WORDS

_DIGIT = {word: str(digit) for digit, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Example:
    """Sound of at most 30 s and what is said in it."""

    wave: Wave
    said: list[Said]

    @property
    def digits(self) -> str:
        """All digits in order."""
        return "".join(item.digits for item in self.said)


@dataclass(frozen=True)
class Heard:
    """What the model made of an example: digits ("?" for any other word), and segments with times."""

    digits: str
    segments: list[Said]


def sequence(clips: list[Clip], rng: Random, long_pauses: bool) -> Example:
    """Three to twelve digits by one voice, 0.05 to 0.5 s apart; if asked, one pause in four is longer."""
    wanted = int(rng.integers(3, 13))
    chosen = [clips[rng.integers(len(clips))] for _ in range(wanted)]
    parts, said, at = [np.zeros(int(rng.uniform(0.1, 0.5) * SAMPLE_RATE), np.float32)], [], 0
    at = len(parts[0])
    for clip in chosen:
        said.append(Said(clip.digits, (at + clip.start) / SAMPLE_RATE, (at + clip.end) / SAMPLE_RATE))
        long = long_pauses and rng.random() < 0.25
        pause_s = rng.uniform(0.8, 1.5) if long else rng.uniform(0.05, 0.5)
        parts += [clip.wave, np.zeros(int(pause_s * SAMPLE_RATE), np.float32)]
        at += len(parts[-2]) + len(parts[-1])
    return Example(np.concatenate(parts)[: 30 * SAMPLE_RATE], said)


def sequences(clips: Iterable[Clip], count: int, seed: int, long_pauses: bool = True) -> list[Example]:
    """``count`` sequences, each by one of the voices that know all digits, in turn."""
    voices: dict[str, list[Clip]] = defaultdict(list)
    for clip in clips:
        if len(clip.digits) == 1:
            voices[clip.voice].append(clip)
    known = [takes for takes in voices.values() if len({clip.digits for clip in takes}) == 10]
    rng = np.random.default_rng(seed)
    return [sequence(known[i % len(known)], rng, long_pauses) for i in range(count)]


def telephone(example: Example, _: Random) -> Example:
    """300 to 3400 Hz, 8 kHz, mu-law."""
    narrow = soxr.resample(example.wave, SAMPLE_RATE, 8000)
    filtered = signal.sosfilt(signal.butter(4, (300, 3400), "bandpass", fs=8000, output="sos"), narrow)
    coded = channel.mu_law(np.asarray(filtered, np.float32))
    wide = soxr.resample(coded, 8000, SAMPLE_RATE).astype(np.float32)
    return Example(wide[: len(example.wave)], example.said)


def noisy(example: Example, rng: Random) -> Example:
    """White or pink noise 20 dB below the level of the speech (silences between digits not counted)."""
    loud = np.concatenate(
        [example.wave[int(s.start_s * SAMPLE_RATE) : int(s.end_s * SAMPLE_RATE)] for s in example.said]
    )
    level = float(np.sqrt((loud**2).mean()))
    noise = noises.coloured_noise(len(example.wave), float(rng.choice([0.0, 3.0])), rng)
    return Example(
        example.wave + noise * np.float32(level), example.said
    )  # the noise has an RMS of 0.1: -20 dB


CHANNELS: dict[str, Callable[[Example, Random], Example]] = {
    "as it is": lambda example, _: example,
    "telephone": telephone,
    "20 dB noise": noisy,
}


def digit_errors(reference: str, hypothesis: str) -> int:
    """Substitutions, insertions and deletions (Levenshtein)."""
    row = list(range(len(hypothesis) + 1))
    for i, wanted in enumerate(reference, 1):
        previous, row[0] = row[0], i
        for j, got in enumerate(hypothesis, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (wanted != got))
    return row[-1]


def as_digits(text: str) -> str:
    """The text's words as digits: "407" for " four zero seven"; any other word becomes "?"."""
    return "".join(_DIGIT.get(word, "?") for word in text.split())


class Listener:
    """The model directory in asr-server's engine: float32, greedy, whose tokens are those of transformers'
    ``generate`` (tests/engine/test_parity.py) in a tenth of the time.
    """

    def __init__(self, folder: Path) -> None:
        self.engine = Engine.load(EngineConfig(str(folder), dtype="float32"))
        self.begin = self.engine.tokenizer.specials.timestamp_begin

    def hear(self, waves: list[Wave], with_times: bool) -> list[Heard]:
        """Transcribe each wave (30 s at most) on its own."""
        options = DecodingOptions(language="en", timestamps=with_times, temperatures=(0.0,))
        for i, wave in enumerate(waves):
            self.engine.handle(Submit(ChunkId("", i), wave[: 30 * SAMPLE_RATE], options))
        heard: dict[int, Heard] = {}
        with tqdm(total=len(waves), leave=False) as bar:
            while self.engine.has_work:
                for event in self.engine.step():
                    if isinstance(event, Result):
                        heard[event.id.chunk] = self._read(event.result.tokens)
                        bar.update()
        return [heard[i] for i in range(len(waves))]

    def _read(self, tokens: Iterable[int]) -> Heard:
        decode = self.engine.tokenizer.decode
        found: list[Said] = []
        start_s, words, text = None, list[int](), list[int]()
        for token in tokens:
            if token >= self.begin:
                time_s = (token - self.begin) * 0.02
                if start_s is not None and words:
                    found.append(Said(as_digits(decode(words)), start_s, time_s))
                    start_s, words = None, []
                else:
                    start_s = time_s
            else:
                text.append(token)
                if start_s is not None:
                    words.append(token)
        return Heard(as_digits(decode(text)), found)


@dataclass(frozen=True)
class Score:
    """Errors of a set of sequences; times only of segments whose digits and number are right."""

    digits: int
    errors: int
    times_s: list[float]
    segments_total: int

    @property
    def rate(self) -> float:
        """Digit error rate."""
        return self.errors / max(1, self.digits)

    def __str__(self) -> str:
        line = f"{100 * self.rate:.1f} % of {self.digits} digits"
        if self.times_s:
            worst = np.quantile(self.times_s, 0.95)
            within = 100 * np.mean(np.array(self.times_s) <= 0.2)
            line += f"; times: median {np.median(self.times_s):.3f} s, 95 % {worst:.3f} s"
            line += f", within 0.2 s {within:.1f} %"
        return line


def score(listener: Listener, examples: list[Example], with_times: bool) -> Score:
    """Hear the examples and count."""
    errors, digits, total = 0, 0, 0
    times_s: list[float] = []
    for example, heard in zip(examples, listener.hear([e.wave for e in examples], with_times), strict=True):
        digits += len(example.digits)
        errors += digit_errors(example.digits, heard.digits)
        truth = segments(example.said)
        total += len(truth)
        if with_times and [s.digits for s in truth] == [s.digits for s in heard.segments]:
            for wanted, got in zip(truth, heard.segments, strict=True):
                times_s += [abs(wanted.start_s - got.start_s), abs(wanted.end_s - got.end_s)]
    return Score(digits, errors, times_s, total)


def rejected(listener: Listener, waves: list[Wave], with_times: bool) -> tuple[int, int]:
    """How many come out empty, of how many."""
    return sum(not heard.digits for heard in listener.hear(waves, with_times)), len(waves)


def noise_waves(count: int, seed: int) -> dict[str, list[Wave]]:
    """Every kind of noise of ``noises``, ``count`` of each, 1 to 12 s."""
    rng = np.random.default_rng(seed)
    kinds = {maker.__name__: maker for maker in noises.MAKERS}
    return {
        name: [
            channel.set_level(maker(int(rng.uniform(1, 12) * SAMPLE_RATE), rng), rng) for _ in range(count)
        ]
        for name, maker in kinds.items()
    }


def read_mono(path: Path) -> Wave:
    """A recording as 16 kHz mono."""
    wave, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    resampled: Wave = soxr.resample(wave.mean(axis=1), rate_hz, SAMPLE_RATE)
    return np.asarray(resampled, np.float32)
