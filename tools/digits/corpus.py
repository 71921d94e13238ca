"""Fills the cache: shards of synthesised voices and of recorded voices with their variations."""

from __future__ import annotations

import io
import tarfile
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import soxr
from tqdm import tqdm

from .clips import SAMPLE_RATE, Clip, ClipStore, Samples, make_clip
from .vary import analyse, random_manner, varied
from .voices import is_held_out, synthesise_espeak, synthesise_festival, synthesise_flite, synthesise_pico

Job = tuple[Path, Callable[[int, int], ClipStore], int, int]

ESPEAK_SHARDS, SPEAKERS_PER_SHARD = 6, 300
STYLES = {"pico": 16, "flite": 16, "festival": 8}
MANNERS_PER_SPEAKER = 24
CLIPS_PER_MANNER = 60


def _make(job: Job) -> Path:
    path, function, amount, seed = job
    if not path.exists():
        function(amount, seed).save(path)
    return path


def _run(jobs: list[Job], processes: int, title: str) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(_make, jobs), total=len(jobs), desc=title):
            pass


def synthesise_all(cache: Path, processes: int) -> None:
    """Synthesised voices; a shard that exists is left as it is."""
    folder = cache / "synthesised"
    jobs: list[Job] = [
        (folder / "pico.npz", synthesise_pico, STYLES["pico"], 3),
        (folder / "flite.npz", synthesise_flite, STYLES["flite"], 2),
        (folder / "festival.npz", synthesise_festival, STYLES["festival"], 4),
    ]
    jobs += [
        (folder / f"espeak-{i}.npz", synthesise_espeak, SPEAKERS_PER_SHARD, 10 + i)
        for i in range(ESPEAK_SHARDS)
    ]
    _run(jobs, processes, "voices")


def read_recordings(archive: Path) -> dict[str, ClipStore]:
    """The recordings by speaker, as 16 kHz clips named "recorded/SPEAKER/plain"."""
    speakers: dict[str, ClipStore] = defaultdict(ClipStore)
    with tarfile.open(archive) as tar:
        for member in tar:  # in the archive's order: a compressed one cannot go back
            file = tar.extractfile(member) if member.name.endswith(".wav") else None
            if file is None:
                continue
            digit, speaker, _ = Path(member.name).stem.split("_")
            samples = _read(file.read())
            speakers[speaker].add(make_clip(samples, digit, f"recorded/{speaker}/plain"))
    return dict(speakers)


def _read(content: bytes) -> Samples:
    samples, rate_hz = soundfile.read(io.BytesIO(content), dtype="int16")
    resampled: Samples = soxr.resample(samples, rate_hz, SAMPLE_RATE)
    return resampled


def _vary(clips: list[Clip], seed: int) -> ClipStore:
    """Each of many manners speaks a random selection of the clips, every digit among them."""
    rng, store = np.random.default_rng(seed), ClipStore()
    parts = [analyse(clip.samples) for clip in clips]
    for _ in range(MANNERS_PER_SPEAKER):
        manner = random_manner(rng)
        for index in rng.permutation(len(clips))[:CLIPS_PER_MANNER]:
            samples, voice = varied(clips[index], parts[index], manner)
            store.add(make_clip(samples, clips[index].digits, voice))
    return store


def _vary_to(job: tuple[Path, list[Clip], int]) -> None:
    path, clips, seed = job
    if not path.exists():
        _vary(clips, seed).save(path)


def vary_all(archive: Path, cache: Path, processes: int) -> None:
    """The recordings as they are, and the recordings and the natural synthesised voices in other manners."""
    jobs: list[tuple[Path, list[Clip], int]] = []
    for number, (speaker, store) in enumerate(sorted(read_recordings(archive).items())):
        store.save(cache / "recorded" / f"{speaker}.npz")
        jobs.append((cache / "recorded" / f"{speaker}-varied.npz", store.clips, 100 + number))
    for number, engine in enumerate(("flite", "pico", "festival")):
        by_name: dict[str, list[Clip]] = defaultdict(list)
        for clip in ClipStore.load(cache / "synthesised" / f"{engine}.npz").clips:
            if clip.digits and not is_held_out(clip.voice):
                by_name[clip.voice.split("/")[1]].append(clip)
        for name, clips in sorted(by_name.items()):
            chosen = np.random.default_rng(number).permutation(len(clips))[:150]
            jobs.append(
                (cache / "varied" / f"{engine}-{name}.npz", [clips[i] for i in chosen], 200 + len(jobs))
            )
    with ProcessPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(_vary_to, jobs), total=len(jobs), desc="variations"):
            pass
