"""What ``train_digits.py evaluate`` prints: the tables of the model card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .clips import SAMPLE_RATE, Clip, ClipStore, Wave
from .conditions import CONDITIONS
from .examination import Listener, noise_waves, read_mono, rejected, score
from .judging import held_out_clips
from .sequences import Example, sequences
from .speakers import LEFT_OUT_SPEAKER, SPEAKERS

EASY = ("as it is", "telephone", "20 dB noise")
HARD = ("10 dB white noise", "level jumps of 20 dB")
PROMPTS = (
    "The speaker reads digits.",
    "one two three four five six seven eight nine zero",
    "A phone number, and the name of my fellow passenger on the train to Glasgow.",
    "7 7 7 7 7 7",
)
"""What a request may say beforehand, and what must change nothing."""

_WITHOUT_DIGITS = ("jfk.wav", "cough.wav", "silence-1s.wav", "two-speakers-stereo.wav")
"""Recordings whose words are known and are no digits."""


@dataclass(frozen=True)
class Case:
    """Sequences under one condition, asked for in one way."""

    heard: str
    condition: str
    examples: list[Example]
    with_times: bool
    prompt: str = ""

    @property
    def title(self) -> str:
        """The first columns of its line."""
        times = "with times" if self.with_times else "without times"
        return f"{self.heard} | {self.condition} | {times}"


def _engine(clip: Clip) -> str:
    return clip.voice.split("/")[0]


def _is_english(clip: Clip) -> bool:
    """Whether a voice reads English by English rules; the other voices imitate accents."""
    engine, name, style = clip.voice.split("/")
    return style.startswith("en") if engine == "espeak" else engine == "flite" or name == "en-US"


def _load(path: Path) -> list[Clip]:
    return ClipStore.load(path).clips if path.exists() else []


def _allison(cache: Path) -> list[Clip]:
    return [clip for clip in _load(cache / "people" / "asterisk.npz") if "_Allison" in clip.voice]


def unheard_sets(cache: Path, count: int) -> Iterator[tuple[str, list[Example]]]:
    """Sequences by voices that train nothing, by name."""
    allison = [clip for clip in _allison(cache) if clip.digits]
    if allison:
        yield "Allison of Asterisk, never heard", sequences(allison, count, seed=6)
    clips = held_out_clips(cache)
    english = [clip for clip in clips if _is_english(clip)]
    for engine in sorted({_engine(clip) for clip in english}):
        own = [clip for clip in english if _engine(clip) == engine]
        yield f"voices left out: {engine}, English", sequences(own, count, seed=8)
    accented = [clip for clip in clips if not _is_english(clip) and _engine(clip) == "espeak"]
    if accented:
        yield "voices left out: espeak, other languages' accents", sequences(accented, count, seed=9)


def cases(cache: Path, count: int, examined: bool) -> Iterator[Case]:
    """Every line of the table of digit error rates."""
    for name, examples in _sets(cache, count, examined):
        is_first = "never heard" in name or name.startswith(LEFT_OUT_SPEAKER)
        for condition in (*EASY, *HARD) if is_first else EASY:
            rng = np.random.default_rng(11)
            changed = [CONDITIONS[condition](example, rng) for example in examples]
            yield Case(name, condition, changed, with_times=True)
            if condition == "as it is":
                yield Case(name, condition, changed, with_times=False)
        for prompt in PROMPTS if is_first else ():
            yield Case(name, f'prompt "{prompt}"', examples, True, prompt)
    for speaker in SPEAKERS:
        own = _load(cache / "recorded" / f"{speaker}.npz")
        if own and not (examined and speaker == LEFT_OUT_SPEAKER):
            yield Case(f"{speaker}, who trained it", "as it is", sequences(own, count, seed=12), True)


def _sets(cache: Path, count: int, examined: bool) -> Iterator[tuple[str, list[Example]]]:
    recorded = _load(cache / "recorded" / f"{LEFT_OUT_SPEAKER}.npz")
    if examined and recorded:
        yield f"{LEFT_OUT_SPEAKER}, left out", sequences(recorded, count, seed=7)
    yield from unheard_sets(cache, count)


def wordless(cache: Path, audio: Path, count: int) -> dict[str, list[Wave]]:
    """What must come out empty, by kind."""
    sounds: dict[str, list[Wave]] = noise_waves(count, seed=13)
    sounds["silence"] = [np.zeros(SAMPLE_RATE * seconds, np.float32) for seconds in (1, 5, 30)]
    speech = [clip for clip in held_out_clips(cache) if not clip.digits and _is_english(clip)]
    sounds["other speech, voices left out"] = [clip.wave for clip in speech[: 5 * count]]
    strange = held_out_clips(cache, "other-speech-*.npz")
    sounds["words like digits, made-up words and others"] = [clip.wave for clip in strange[: 5 * count]]
    minute = [clip.wave for clip in speech[:: max(1, len(speech) // 80)]]
    sounds["other speech for a minute"] = [np.concatenate(minute)[: 60 * SAMPLE_RATE]]
    spanish = [clip.wave for clip in _allison(cache) if "es_MX" in clip.voice]
    sounds["Spanish, a person never heard"] = spanish[: 5 * count]
    for name in _WITHOUT_DIGITS:
        if (audio / name).exists():
            sounds[name] = [read_mono(audio / name)]
    return {name: waves for name, waves in sounds.items() if waves}


def lines(listener: Listener, asked: Iterable[Case], sounds: dict[str, list[Wave]]) -> Iterator[str]:
    """Every line of the tables, as soon as it is known."""
    yield "| heard | condition | asked for | digit errors |"
    yield "| --- | --- | --- | --- |"
    for case in asked:
        yield f"| {case.title} | {score(listener, case.examples, case.with_times, case.prompt)} |"
    yield ""
    yield "| what must come out empty | empty |"
    yield "| --- | --- |"
    for name, waves in sounds.items():
        empty, total = rejected(listener, waves, with_times=True)
        yield f"| {name} | {empty} of {total} |"
