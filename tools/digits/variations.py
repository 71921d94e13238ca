"""More people in the cache: variations of those who are there, and blends of two of them."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache as remembered
from itertools import combinations
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .blend import blended, random_share
from .clips import Clip, ClipStore, make_clip
from .corpus import Amounts
from .speakers import LEFT_OUT_SPEAKER
from .vary import analyse, random_manner, speak, varied
from .voices import is_held_out, voice_name

_ENGINES = ("pico", "flite", "festival")
_BLENDED_VOICES = ("flite/slt",)
"""Synthesised voices that are blended with people's: natural ones of women, of whom there are few."""
_TAKES_PER_DIGIT = 8


@dataclass(frozen=True)
class Vary:
    """One voice in many manners."""

    clips: list[Clip]
    num_manners: int
    clips_per_manner: int
    seed: int

    def make(self) -> ClipStore:
        """Each manner speaks a random selection of the clips."""
        rng, store = np.random.default_rng(self.seed), ClipStore()
        analysed = remembered(lambda index: analyse(self.clips[index].samples))
        for _ in range(self.num_manners):
            manner = random_manner(rng)
            for index in rng.permutation(len(self.clips))[: self.clips_per_manner].tolist():
                samples, voice = varied(self.clips[index], analysed(index), manner, rng)
                store.add(make_clip(samples, self.clips[index].digits, voice))
        return store


@dataclass(frozen=True)
class Blend:
    """Many speakers between two."""

    names: str
    first: list[Clip]
    second: list[Clip]
    num_voices: int
    clips_per_voice: int
    seed: int

    def make(self) -> ClipStore:
        """Each new speaker lies elsewhere between the two, and speaks in a manner of his own."""
        rng, store = np.random.default_rng(self.seed), ClipStore()
        takes = [list(some_takes(clips, rng)) for clips in (self.first, self.second)]
        analysed = remembered(lambda side, index: analyse(takes[side][index].samples))
        for number in range(self.num_voices):
            side = number % 2  # whose timing it is
            share = random_share(analysed(side, 0).envelope.shape[1], rng)
            manner = random_manner(rng, pitch_octaves=(-0.5, 0.5))
            for index in rng.integers(len(takes[side]), size=self.clips_per_voice).tolist():
                digit = takes[side][index].digits
                partners = [i for i, clip in enumerate(takes[1 - side]) if clip.digits == digit]
                if partners:
                    partner = analysed(1 - side, int(rng.choice(partners)))
                    samples = speak(blended(analysed(side, index), partner, share), manner, rng)
                    store.add(make_clip(samples, digit, f"blended/{self.names}/{number}+{manner}"))
        return store


def some_takes(clips: list[Clip], rng: np.random.Generator) -> Iterator[Clip]:
    """A few takes of each single digit."""
    by_digit: dict[str, list[Clip]] = defaultdict(list)
    for index in rng.permutation(len(clips)).tolist():
        if len(clips[index].digits) == 1:
            by_digit[clips[index].digits].append(clips[index])
    for digit in sorted(by_digit):
        yield from by_digit[digit][:_TAKES_PER_DIGIT]


def _make(job: tuple[Path, Vary | Blend]) -> None:
    path, task = job
    if not path.exists():
        task.make().save(path)


def vary_all(cache: Path, amounts: Amounts, processes: int) -> None:
    """People and natural synthesised voices in other manners, and blends of them."""
    people = _people(cache)
    voices = {name: clips for engine in _ENGINES for name, clips in _voices(cache, engine)}
    blended_voices = people | {name: voices[name] for name in _BLENDED_VOICES if name in voices}
    jobs = [
        *_variations(cache, people, amounts.manners_per_person, amounts.clips_per_manner),
        *_variations(cache, voices, amounts.manners_per_synthesised_voice, amounts.clips_per_manner),
        *_blends(cache, blended_voices, amounts),
    ]
    with ProcessPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(_make, jobs), total=len(jobs), desc="variations"):
            pass


def _people(cache: Path) -> dict[str, list[Clip]]:
    """Clips by voice ("recorded/george") of those who were recorded, and of the neural voice."""
    paths = [p for p in sorted((cache / "recorded").glob("*.npz")) if p.stem != LEFT_OUT_SPEAKER]
    recorded = {f"recorded/{path.stem}": ClipStore.load(path).clips for path in paths}
    return recorded | dict(_voices(cache, "hibari"))


def _voices(cache: Path, engine: str) -> Iterator[tuple[str, list[Clip]]]:
    """Digits by the voices of one synthesiser that train, 150 clips each."""
    path = cache / "synthesised" / f"{engine}.npz"
    by_name: dict[str, list[Clip]] = defaultdict(list)
    for clip in ClipStore.load(path).clips if path.exists() else []:
        if clip.digits and not is_held_out(clip.voice):
            by_name[voice_name(clip.voice)].append(clip)
    for name, clips in sorted(by_name.items()):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        yield name, [clips[i] for i in rng.permutation(len(clips))[:150]]


def _variations(
    cache: Path, voices: dict[str, list[Clip]], num_manners: int, clips_per_manner: int
) -> Iterable[tuple[Path, Vary]]:
    for name, clips in voices.items():
        path = cache / "varied" / f"{name.replace('/', '-')}.npz"
        yield path, Vary(clips, num_manners, clips_per_manner, zlib.crc32(name.encode()))


def _blends(cache: Path, voices: dict[str, list[Clip]], amounts: Amounts) -> Iterable[tuple[Path, Blend]]:
    for first, second in combinations(sorted(voices), 2):
        names = f"{first.split('/')[1]}+{second.split('/')[1]}"
        yield (
            cache / "varied" / f"blended-{names}.npz",
            Blend(
                names,
                voices[first],
                voices[second],
                amounts.blends_per_pair,
                amounts.clips_per_blend,
                zlib.crc32(names.encode()),
            ),
        )
