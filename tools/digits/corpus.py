"""Fills the cache: shards of synthesised voices and of recorded voices with their variations."""

from __future__ import annotations

import io
import shutil
import tarfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from tqdm import tqdm

from .clips import SAMPLE_RATE, Clip, ClipStore, Samples, make_clip
from .speakers import LEFT_OUT_SPEAKER, SPEAKERS
from .vary import Analysis, analyse, random_manner, varied
from .voices import (
    is_held_out,
    read_16k,
    synthesise_espeak,
    synthesise_festival,
    synthesise_flite,
    synthesise_other_speech,
    synthesise_pico,
)

Job = tuple[Path, Callable[[int, int], ClipStore], int, int]
VaryJob = tuple[Path, list[Clip], int, int, int]

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
    manners_per_person: int
    manners_per_synthesised_voice: int
    clips_per_manner: int


FULL_AMOUNTS = Amounts(6, 2, 300, 16, 16, 8, 24, 8, 60)
QUICK_AMOUNTS = Amounts(1, 1, 12, 1, 1, 0, 1, 1, 10)


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
    if shutil.which(_PROGRAMS[engine]):
        return True
    print(f"{_PROGRAMS[engine]} is not installed: going on without the voices of {engine}")
    return False


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


def read_prompts(folder: Path) -> ClipStore:
    """What Asterisk's speakers say to callers, as speech without digits, and the English one's digits.

    Left out is what may name a number or a letter. Voices are named "asterisk/SPEAKER/plain".
    """
    store = ClipStore()
    for path in sorted(folder.glob("*/**/*.wav")):
        speaker, *groups = path.relative_to(folder).parts[:-1]
        is_digit = speaker.startswith("en") and groups == ["digits"] and path.stem in set("0123456789")
        if is_digit or not groups:
            samples = read_16k(path)[: 8 * SAMPLE_RATE]
            store.add(make_clip(samples, path.stem if is_digit else "", f"asterisk/{speaker}/plain"))
    return store


def _vary(clips: list[Clip], num_manners: int, clips_per_manner: int, seed: int) -> ClipStore:
    """Each of many manners speaks a random selection of the clips, every digit among them."""
    rng, store = np.random.default_rng(seed), ClipStore()
    analyses: dict[int, Analysis] = {}
    for _ in range(num_manners):
        manner = random_manner(rng)
        for index in rng.permutation(len(clips))[:clips_per_manner]:
            if index not in analyses:
                analyses[index] = analyse(clips[index].samples)
            samples, voice = varied(clips[index], analyses[index], manner)
            store.add(make_clip(samples, clips[index].digits, voice))
    return store


def _vary_to(job: VaryJob) -> None:
    path, clips, num_manners, clips_per_manner, seed = job
    if not path.exists():
        _vary(clips, num_manners, clips_per_manner, seed).save(path)


def people_all(archive: Path, prompts: Path, cache: Path) -> None:
    """The recorded people: those of the spoken digits, and Asterisk's speakers where they are installed."""
    if archive.exists():
        for speaker, store in read_recordings(archive).items():
            store.save(cache / "recorded" / f"{speaker}.npz")
    else:
        print(f"{archive} is missing: going on without recorded digits")
    if prompts.exists():
        read_prompts(prompts).save(cache / "people" / "asterisk.npz")
    else:
        print(f"{prompts} is missing: going on without other speech by people")


def vary_all(cache: Path, amounts: Amounts, processes: int) -> None:
    """The recorded people and the natural synthesised voices in other manners."""
    jobs = [*_vary_people(cache, amounts), *_vary_voices(cache, amounts)]
    with ProcessPoolExecutor(processes) as pool:
        for _ in tqdm(pool.map(_vary_to, jobs), total=len(jobs), desc="variations"):
            pass


def _vary_people(cache: Path, amounts: Amounts) -> Iterator[VaryJob]:
    for number, speaker in enumerate(SPEAKERS):
        path = cache / "recorded" / f"{speaker}.npz"
        if path.exists() and speaker != LEFT_OUT_SPEAKER:
            clips, varied_path = ClipStore.load(path).clips, path.with_name(f"{speaker}-varied.npz")
            yield varied_path, clips, amounts.manners_per_person, amounts.clips_per_manner, 100 + number


def _vary_voices(cache: Path, amounts: Amounts) -> Iterator[VaryJob]:
    for number, engine in enumerate(_PROGRAMS):
        path = cache / "synthesised" / f"{engine}.npz"
        by_name: dict[str, list[Clip]] = defaultdict(list)
        for clip in ClipStore.load(path).clips if path.exists() else []:
            if clip.digits and not is_held_out(clip.voice):
                by_name[clip.voice.split("/")[1]].append(clip)
        for name, clips in sorted(by_name.items()):
            some = [clips[i] for i in np.random.default_rng(number).permutation(len(clips))[:150]]
            varied_path, seed = (
                cache / "varied" / f"{engine}-{name}.npz",
                zlib.crc32(f"{engine}/{name}".encode()),
            )
            yield varied_path, some, amounts.manners_per_synthesised_voice, amounts.clips_per_manner, seed
