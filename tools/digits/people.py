"""The recorded people: who says digits, and who says other things."""

from __future__ import annotations

import io
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import soundfile
import soxr

from .clips import SAMPLE_RATE, Clip, ClipStore, Samples, make_clip
from .voices import read_16k

CLOCK = Path("/usr/share/saytime")
"""The package saytime: David C Dawson reads the clock (GNU GPL)."""
CLOCK_SPEAKER = "dawson"
WORDS = Path("/usr/share/ktuberling/sounds")
"""The package ktuberling-data: people of many languages name things (GPL-2+)."""
_MAX_OTHER_S = 8


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


def read_clock(folder: Path) -> ClipStore:
    """One take of each digit by a speaker of the time."""
    store = ClipStore()
    for digit in "0123456789":
        store.add(make_clip(read_16k(folder / f"{digit}.au"), digit, f"recorded/{CLOCK_SPEAKER}/plain"))
    return store


def read_prompts(folder: Path) -> ClipStore:
    """What Asterisk's speakers say to callers, as speech without digits, and the English one's digits.

    Left out is what may name a number or a letter. Voices are named "asterisk/SPEAKER/plain".
    """
    store = ClipStore()
    for path in sorted(folder.glob("*/**/*.wav")):
        speaker, *groups = path.relative_to(folder).parts[:-1]
        is_digit = speaker.startswith("en") and groups == ["digits"] and path.stem in set("0123456789")
        if is_digit or not groups:
            store.add(_other(path, path.stem if is_digit else "", f"asterisk/{speaker}/plain"))
    return store


def read_words(folder: Path) -> ClipStore:
    """Names of things in many languages, as speech without digits, by voices "words/LANGUAGE/plain"."""
    store = ClipStore()
    for path in sorted(folder.glob("*/*")):
        if path.suffix in {".ogg", ".wav", ".opus"}:
            store.add(_other(path, "", f"words/{path.parent.name}/plain"))
    return store


def _other(path: Path, digits: str, voice: str) -> Clip | None:
    return make_clip(read_16k(path)[: _MAX_OTHER_S * SAMPLE_RATE], digits, voice)


def save_people(archive: Path, prompts: Path, cache: Path) -> None:
    """Everybody who is installed, in the cache; who is not is passed over."""
    for name, folder, store in _present(archive, prompts):
        store.save(cache / folder / f"{name}.npz")


def _present(archive: Path, prompts: Path) -> Iterator[tuple[str, str, ClipStore]]:
    if _exists(archive):
        yield from ((speaker, "recorded", store) for speaker, store in read_recordings(archive).items())
    if _exists(CLOCK):
        yield CLOCK_SPEAKER, "recorded", read_clock(CLOCK)
    if _exists(prompts):
        yield "asterisk", "people", read_prompts(prompts)
    if _exists(WORDS):
        yield "words", "people", read_words(WORDS)


def _exists(path: Path) -> bool:
    if not path.exists():
        print(f"{path} is missing: going on without it")
    return path.exists()
