"""The examination: digit error rates, times and what must come out empty, through HTTP on a real server.

Only voices that never trained the examined model are heard, except where a line says so.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import soundfile
import soxr
from tqdm import tqdm

from . import channel, noises
from .clips import SAMPLE_RATE, Wave
from .sequences import Example, digit_errors
from .texts import WORDS
from .windows import Said, segments

CONCURRENCY = 8
_DIGIT = {word: str(digit) for digit, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Heard:
    """What the model made of an example: digits ("?" for any other word), and segments with times."""

    digits: str
    segments: list[Said]


def as_digits(text: str) -> str:
    """The text's words as digits: "407" for " four zero seven"; any other word becomes "?"."""
    return "".join(_DIGIT.get(word, "?") for word in text.split())


class Listener:
    """A server, asked for the transcripts of many sounds, a few at a time."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=300)

    def hear(self, waves: list[Wave], with_times: bool, prompt: str = "") -> list[Heard]:
        """Transcribe each wave on its own."""
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            heard = pool.map(lambda wave: self._transcribe(wave, with_times, prompt), waves)
            return list(tqdm(heard, total=len(waves), leave=False))

    def _transcribe(self, wave: Wave, with_times: bool, prompt: str) -> Heard:
        fields = {
            "model": "whisper-1",
            "language": "en",
            "response_format": "verbose_json" if with_times else "json",
            "prompt": prompt,
        }
        answer = self._client.post(
            "/v1/audio/transcriptions", data=fields, files={"file": ("sound.wav", as_wav(wave))}
        )
        answer.raise_for_status()
        body = answer.json()
        found = [Said(as_digits(s["text"]), s["start"], s["end"]) for s in body.get("segments") or []]
        return Heard(as_digits(body["text"]), found)


def as_wav(wave: Wave) -> bytes:
    """The bytes of a 16-bit WAV file."""
    file = io.BytesIO()
    soundfile.write(file, np.clip(wave, -1, 1), SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


@dataclass(frozen=True)
class Score:
    """Errors of a set of sequences; times only of segments whose digits and number are right."""

    digits: int
    errors: int
    times_s: list[float]

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


def score(listener: Listener, examples: list[Example], with_times: bool, prompt: str = "") -> Score:
    """Hear the examples and count."""
    errors, digits = 0, 0
    times_s: list[float] = []
    answers = listener.hear([example.wave for example in examples], with_times, prompt)
    for example, heard in zip(examples, answers, strict=True):
        digits += len(example.digits)
        errors += digit_errors(example.digits, heard.digits)
        truth = segments(example.said)
        if with_times and [s.digits for s in truth] == [s.digits for s in heard.segments]:
            for wanted, got in zip(truth, heard.segments, strict=True):
                times_s += [abs(wanted.start_s - got.start_s), abs(wanted.end_s - got.end_s)]
    return Score(digits, errors, times_s)


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
