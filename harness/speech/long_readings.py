"""Long recordings of known sentences under conditions, the same for the same seed.

Used by `benchmarks/long_recordings.py`, whose first lines say what the conditions are.
"""

import io
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from scipy.signal import fftconvolve

from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import mono
from harness.speech.digits import silence
from harness.speech.noises import by_telephone, make_noise
from harness.speech.synthesis import SaidSentence, Speech, say, sentences, word_times_s

KINDS: Final = ("plain", "distant", "foreign", "gaps")
TEMPOS: Final = (0.8, 1.0, 1.2)
GAPS: Final = ("music", "pink", "hum", "babble", "tones", "silence")
FOREIGN: Final = (
    ("de", "Morgen wird es in den Bergen regnen, und wir bleiben zu Hause."),
    ("es", "Los barcos salieron del puerto antes de que llegara la tormenta."),
    ("fr", "Nous avons marché toute la journée dans la forêt sans voir personne."),
)

Random = np.random.Generator


def recording(kind: str, duration_s: float, seed: int) -> Speech:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    texts = list(rng.permutation(np.array(sentences(), object)))
    parts, said, num_samples = [silence(0.5)], list[SaidSentence](), SAMPLE_RATE // 2
    while num_samples < duration_s * SAMPLE_RATE and texts:
        text, tempo, start_s = texts.pop(), float(rng.choice(TEMPOS)), num_samples / SAMPLE_RATE
        spoken = at_level(say(text, tempo), rng.uniform(-40, -18))
        spoken = distant(spoken, len(said), rng) if kind == "distant" else spoken
        words_s = tuple((start_s + first, start_s + last) for first, last in word_times_s(text, tempo))
        said.append(SaidSentence(text, start_s, start_s + len(spoken) / SAMPLE_RATE, words_s))
        parts += [spoken, *between(kind, len(said), rng)]
        num_samples = sum(map(len, parts))
    return Speech(np.concatenate(parts), tuple(said))


def between(kind: str, number: int, rng: Random) -> Iterator[Samples]:
    """What follows the sentence with this number, counted from 1."""
    yield silence(float(np.exp(rng.uniform(np.log(0.2), np.log(6.0)))))
    if kind == "gaps" and number % 4 == 0:
        yield make_noise(GAPS[number // 4 % len(GAPS)], -30, rng.uniform(12, 60), number)
    if kind == "foreign" and number % 3 == 0 and shutil.which("espeak-ng"):
        yield at_level(foreign(*FOREIGN[number // 3 % len(FOREIGN)]), -25)
        yield silence(rng.uniform(0.3, 1.5))


def at_level(samples: Samples, level_db: float) -> Samples:
    level = float(np.sqrt(np.mean(samples**2)))
    return np.asarray(samples * (10 ** (level_db / 20) / level), np.float32)


def distant(samples: Samples, number: int, rng: Random) -> Samples:
    way: Callable[[], Samples] = (
        lambda: echoing(samples, rng),
        lambda: (
            samples
            + at_level(make_noise("pink", -30, len(samples) / SAMPLE_RATE, number), level_db(samples) - 10)
        ),
        lambda: by_telephone(samples),
    )[number % 3]
    return np.asarray(way(), np.float32)


def level_db(samples: Samples) -> float:
    return float(10 * np.log10(np.mean(samples**2)))


def echoing(samples: Samples, rng: Random) -> Samples:
    """In a room whose echo falls by 60 dB in half a second."""
    times_s = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    room = rng.standard_normal(len(times_s)) * 10 ** (-3 * times_s / 0.5) * 0.05
    room[0] = 1.0
    return np.asarray(fftconvolve(samples, room)[: len(samples)], np.float32)


def foreign(language: str, text: str) -> Samples:
    raw = subprocess.run(["espeak-ng", "-v", language, "--stdout", text], check=True, capture_output=True)
    return mono(io.BytesIO(raw.stdout))
