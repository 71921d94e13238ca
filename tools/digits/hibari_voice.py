"""A woman's voice by a neural synthesiser whose weights come in its package: hibari's "heart"."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import numpy.typing as npt
import soxr

from .clips import SAMPLE_RATE, ClipStore, Samples, make_clip
from .texts import other_text, strange_text
from .voices import random_digits

_WORDS = (
    ("zˈɪɹO", "zˈiɹO"), ("wˈʌn", "wˈɑn"), ("tˈu", "tˈuː", "tʃˈu"), ("θɹˈi",), ("fˈɔɹ", "fˈOɹ"),
    ("fˈIv",), ("sˈɪks",), ("sˈɛvᵊn", "sˈɛvən"), ("ˈAt",), ("nˈIn",),
)  # fmt: skip
"""Each digit in the synthesiser's phonemes, in more than one way where people differ."""


def is_installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("hibari") is not None


def synthesise_hibari(styles: int, seed: int) -> ClipStore:
    """Digits and other things at random tempos, the digits one by one and in runs."""
    from hibari import Hibari

    engine, rng, store = Hibari(), random.Random(seed), ClipStore()
    for style in range(styles):
        speed, voice = rng.uniform(0.6, 1.5), f"hibari/heart/{style}"
        for digits in [str(d) for d in range(10)] + [random_digits(rng.randint(2, 6), rng) for _ in range(4)]:
            phonemes = " ".join(rng.choice(_WORDS[int(d)]) for d in digits) + rng.choice(".,?!")
            wave = engine.from_phonemes(phonemes, speed=speed, seed=rng.randrange(1 << 30))
            store.add(make_clip(_as_16k(wave), digits, voice))
        for text in (other_text(rng), strange_text(rng), strange_text(rng)):
            store.add(make_clip(_as_16k(engine(text, speed=speed)), "", voice))
    return store


def _as_16k(wave: npt.NDArray[np.float32]) -> Samples:
    resampled = soxr.resample(np.clip(wave, -1, 1) * 32767, 24_000, SAMPLE_RATE)
    return np.asarray(resampled, np.int16)
