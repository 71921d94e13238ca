"""Fills the cache with shards of synthesised voices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from . import hibari_voice
from .clips import ClipStore
from .voices import (
    synthesise_espeak,
    synthesise_festival,
    synthesise_flite,
    synthesise_other_speech,
    synthesise_pico,
)

Job = tuple[Path, Callable[[int, int], ClipStore], int, int]

_PROGRAMS = {"pico": "pico2wave", "flite": "flite", "festival": "festival"}


@dataclass(frozen=True)
class Amounts:
    """How much sound is made of each kind."""

    espeak_shards: int
    other_speech_shards: int
    speakers_per_shard: int
    pico_styles: int
    flite_styles: int
    festival_styles: int
    hibari_styles: int
    manners_per_person: int
    manners_per_synthesised_voice: int
    clips_per_manner: int
    blends_per_pair: int
    clips_per_blend: int


FULL_AMOUNTS = Amounts(
    espeak_shards=6,
    other_speech_shards=2,
    speakers_per_shard=300,
    pico_styles=16,
    flite_styles=16,
    festival_styles=8,
    hibari_styles=40,
    manners_per_person=80,
    manners_per_synthesised_voice=8,
    clips_per_manner=60,
    blends_per_pair=10,
    clips_per_blend=30,
)
QUICK_AMOUNTS = Amounts(1, 1, 12, 1, 1, 0, 1, 1, 1, 10, 1, 4)


def _make(job: Job) -> Path:
    path, function, amount, seed = job
    if not path.exists():
        function(amount, seed).save(path)
    return path


def _run(jobs: list[Job], processes: int, title: str) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(_make, jobs), total=len(jobs), desc=title):
            pass


def synthesise_all(cache: Path, amounts: Amounts, processes: int) -> None:
    """Synthesised voices; a shard that exists is left as it is, a program that is missing is passed over."""
    folder, count = cache / "synthesised", amounts.speakers_per_shard
    jobs: list[Job] = [
        (folder / "pico.npz", synthesise_pico, amounts.pico_styles, 3),
        (folder / "flite.npz", synthesise_flite, amounts.flite_styles, 2),
        (folder / "festival.npz", synthesise_festival, amounts.festival_styles, 4),
        (folder / "hibari.npz", hibari_voice.synthesise_hibari, amounts.hibari_styles, 5),
    ]
    jobs = [job for job in jobs if _is_installed(job[0].stem)]
    jobs += [
        (folder / f"espeak-{i}.npz", synthesise_espeak, count, 10 + i) for i in range(amounts.espeak_shards)
    ]
    jobs += [
        (folder / f"other-speech-{i}.npz", synthesise_other_speech, count, 30 + i)
        for i in range(amounts.other_speech_shards)
    ]
    _run(jobs, processes, "voices")


def _is_installed(engine: str) -> bool:
    if shutil.which(_PROGRAMS[engine]) if engine in _PROGRAMS else hibari_voice.is_installed():
        return True
    print(f"{engine} is not installed: going on without its voices")
    return False
