"""What ``train_digits.py evaluate`` prints: the tables of the model card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .clips import Clip, ClipStore, Wave
from .examination import CHANNELS, Example, Listener, noise_waves, read_mono, rejected, score, sequences
from .plans import LEFT_OUT_SPEAKER
from .voices import is_held_out

NUM_SEQUENCES = 200
"""Of the speaker left out; of each kind of synthesised voices 60."""
_TRAINED_SPEAKERS = ("george", "lucas", "nicolas", "yweweler")
_WITHOUT_DIGITS = ("jfk.wav", "cough.wav", "silence-1s.wav", "two-speakers-stereo.wav")
"""Recordings whose words are known and are no digits."""


def held_out_clips(cache: Path) -> list[Clip]:
    """Clips of the synthesised voices that never train anything."""
    clips: list[Clip] = []
    for path in sorted((cache / "synthesised").glob("*.npz")):
        clips += [clip for clip in ClipStore.load(path).clips if is_held_out(clip.voice)]
    return clips


def _engine(clip: Clip) -> str:
    return clip.voice.split("/")[0]


def _is_english(clip: Clip) -> bool:
    """Whether a voice reads English by English rules; the other voices imitate accents."""
    engine, name, style = clip.voice.split("/")
    return style.startswith("en") if engine == "espeak" else engine == "flite" or name == "en-US"


def sets(cache: Path) -> Iterator[tuple[str, list[Example]]]:
    """The sets of sequences by name."""
    recorded = ClipStore.load(cache / "recorded" / f"{LEFT_OUT_SPEAKER}.npz").clips
    yield f"{LEFT_OUT_SPEAKER}, left out", sequences(recorded, NUM_SEQUENCES, seed=7)
    clips = held_out_clips(cache)
    english = [clip for clip in clips if _is_english(clip)]
    for engine in sorted({_engine(clip) for clip in english}):
        own = [clip for clip in english if _engine(clip) == engine]
        yield f"voices left out: {engine}, English", sequences(own, 60, seed=8)
    accented = [clip for clip in clips if not _is_english(clip) and _engine(clip) == "espeak"]
    yield "voices left out: espeak, other languages' accents", sequences(accented, 60, seed=9)


def error_rates(listener: Listener, cache: Path) -> Iterator[str]:
    """Lines of the table of digit error rates."""
    yield "| heard | channel | without times | with times |"
    yield "| --- | --- | --- | --- |"
    for name, examples in sets(cache):
        for channel_name, change in CHANNELS.items():
            rng = np.random.default_rng(11)
            changed = [change(example, rng) for example in examples]
            plain, timed = (score(listener, changed, with_times) for with_times in (False, True))
            yield f"| {name} | {channel_name} | {plain} | {timed} |"
    for speaker in _TRAINED_SPEAKERS:
        own = ClipStore.load(cache / "recorded" / f"{speaker}.npz").clips
        examples = sequences(own, 32, seed=12)
        yield f"| {speaker}, who trained it | as it is | {score(listener, examples, False)} | |"


def rejections(listener: Listener, cache: Path, audio: Path) -> Iterator[str]:
    """Lines of the table of what must come out empty."""
    yield "| sound | empty without times | empty with times |"
    yield "| --- | --- | --- |"
    sounds: dict[str, list[Wave]] = noise_waves(20, seed=13)
    sounds["silence"] = [np.zeros(16_000 * seconds, np.float32) for seconds in (1, 5, 30)]
    speech = [clip for clip in held_out_clips(cache) if not clip.digits and _is_english(clip)]
    sounds["other speech, voices left out"] = [c.wave for c in speech[:100]]
    for name in _WITHOUT_DIGITS:
        if (audio / name).exists():
            sounds[name] = [read_mono(audio / name)]
    for name, waves in sounds.items():
        counts = [rejected(listener, waves, with_times) for with_times in (False, True)]
        yield f"| {name} | " + " | ".join(f"{empty} of {total}" for empty, total in counts) + " |"
