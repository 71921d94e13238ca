"""Conversations of people who are known, joined from recordings of each: the same for the same seed.

Used by `benchmarks/speakers.py`, whose first lines say who the people are.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy.signal import butter, sosfilt

from asr_server.annexes.speakers.labels import Turn
from asr_server.core import SAMPLE_RATE, Samples
from harness.speech.corpora import Clip, corpus, fillets, librivox, mono
from harness.speech.noises import by_telephone
from harness.speech.speech_times import speech_of, without_pauses
from harness.speech.synthesis import is_installed, say, sentences

LONGEST_TURN_S: Final = 15.0
INTERJECTION_S: Final = (1.0, 1.8)
REFERENCE_S: Final = (4.0, 10.0)
LEVEL: Final = 0.05  # root mean square of each person's speech


class Said(NamedTuple):
    samples: Samples
    text: str
    stretches: list[tuple[float, float]]  # where there is speech


@dataclass
class Conversation:
    samples: Samples
    people: list[str]
    turns: list[Turn]  # who really speaks when
    words: list[Turn]  # each, with who said it
    interjections: list[Turn] = field(default_factory=list)
    references: dict[str, Samples] = field(default_factory=dict)  # of each person's voice


@dataclass(frozen=True)
class Kind:
    name: str
    people: Callable[[np.random.Generator, str], list[str]]
    overlap: float = 0.0  # share of the turns that begin before the last one ends
    callers: float = 0.0  # the share of the people who are heard by telephone
    noise_db: float | None = None  # level of speech over noise
    duration_s: tuple[float, float] = (180.0, 180.0)
    least_s: float = 0.0  # that each person speaks


ACTORS: Final = ("small fish", "big fish")
LANGUAGES: Final = ("fr", "it", "ja", "zh")  # of the samples of pytest-audioeval: a voice each


def _two(rng: np.random.Generator, voices: str) -> list[str]:
    actors = [name for name in people(voices) if "fish" in name][::-1]
    return actors if rng.random() < 0.5 else [str(each) for each in rng.permutation(people(voices))[:2]]


def _pair(rng: np.random.Generator, voices: str) -> list[str]:
    return [str(each) for each in rng.permutation(people(voices))[:2]]


def _several(rng: np.random.Generator, voices: str) -> list[str]:
    count = rng.integers(3, min(6, len(people(voices))) + 1)
    return [str(each) for each in rng.permutation(people(voices))[:count]]


KINDS: Final = (
    Kind("two", _two),
    Kind("two, 10 % overlap", _two, overlap=0.35),
    Kind("two, telephone", _two, callers=1.0),
    Kind("two, one by telephone", _two, callers=0.5),
    Kind("two, noise 15 dB", _two, noise_db=15.0),
    Kind("three to six", _several),
    Kind("three to six, 10 % overlap", _several, overlap=0.35),
    Kind("three to six, telephone", _several, callers=1.0),
    Kind("three to six, noise 15 dB", _several, noise_db=15.0),
    Kind("one", lambda rng, voices: [str(rng.choice(people(voices)))]),
)
SHORT_KINDS: Final = (
    Kind("two in 10 to 60 s", _pair, duration_s=(10.0, 55.0), least_s=3.0),
    Kind("two in 10 to 20 s", _pair, duration_s=(8.0, 14.0), least_s=3.0),
    Kind("one in 10 to 60 s", lambda rng, voices: _pair(rng, voices)[:1], duration_s=(10.0, 55.0)),
)

PHONE_KINDS: Final = (
    Kind("two, telephone", _pair, callers=1.0, duration_s=(20.0, 60.0), least_s=3.0),
    Kind("three or four, telephone", _several, callers=1.0, duration_s=(40.0, 120.0), least_s=3.0),
)


@cache
def sayings(voices: str = "tuned") -> dict[str, list[Said]]:
    """Return what each person says, in clips of 1 to 15 s."""
    if voices == "mixed":
        return sayings("tuned") | sayings("others") | sayings("prompts")
    found: dict[str, list[Said]] = {}
    for speaker, clip in _clips(voices):
        if clip.duration_s and 1 <= clip.duration_s < LONGEST_TURN_S:
            found.setdefault(speaker, []).append(_said(clip.samples(), clip.text or ""))
    for voice in {"tuned": ("awb", "rms", "slt"), "others": ("kal16",)}.get(voices, ()):
        if shutil.which("flite"):
            found[voice] = [_said(flite(voice, text), text) for text in sentences()[:60]]
    if voices == "tuned" and is_installed():
        found["joe"] = [_said(say(text), text) for text in sentences()[:40]]
    long_enough = {
        name: [each for each in said if len(each.samples) >= SAMPLE_RATE and each.stretches]
        for name, said in found.items()
    }
    return {name: said for name, said in long_enough.items() if said}


def _clips(voices: str) -> list[tuple[str, Clip]]:
    if voices == "prompts":
        return [(clip.speaker or "", clip) for clip in corpus("prompts")]
    if voices == "tuned":
        clips = [(clip.speaker or "librivox", clip) for clip in (*corpus("fillets"), *librivox())]
    else:
        clips = [(f"{clip.speaker}, Czech", clip) for clip in fillets("cs")]
        clips += [(clip.language, clip) for clip in corpus("audioeval")]
    wanted = (*ACTORS, "librivox", *LANGUAGES)
    return [(speaker, clip) for speaker, clip in clips if speaker.split(",")[0] in wanted and clip.text]


def _said(samples: Samples, text: str) -> Said:
    return Said(samples, text, speech_of(samples))


def flite(voice: str, text: str) -> Samples:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", file.name], check=True)
        return mono(Path(file.name))


def people(voices: str) -> list[str]:
    return sorted(sayings(voices))


def conversations(kind: Kind, seed: int, number: int, voices: str) -> list[Conversation]:
    """Join so many different ones: the same for the same seed."""
    found: list[Conversation] = []
    while len(found) < number:
        conversation = converse(kind, seed, voices)
        seed += 1
        spoken_s = dict.fromkeys(conversation.people, 0.0)
        for turn in conversation.turns:
            spoken_s[turn.speaker] += turn.end_s - turn.start_s
        if min(spoken_s.values()) >= kind.least_s:
            found.append(conversation)
    return found


class _Stage:
    """Sound and what is known of it, clip by clip."""

    def __init__(self, rng: np.random.Generator, speakers: list[str], kind: Kind, duration_s: float) -> None:
        self._rng, self._speakers, self._kind = rng, speakers, kind
        self._callers = speakers[: round(kind.callers * len(speakers))]
        self._near, self._called = np.zeros((2, int((duration_s + 20) * SAMPLE_RATE)), np.float32)
        self._gains = {speaker: 10 ** (rng.uniform(-6, 6) / 20) for speaker in speakers}
        self.turns: list[Turn] = []
        self._words: list[Turn] = []

    def add(self, said: Said, speaker: str, at_s: float) -> float:
        """Return when the clip ends."""
        samples = said.samples
        scale = self._gains[speaker] * LEVEL / max(float(np.sqrt((samples**2).mean())), 1e-4)
        first = int(at_s * SAMPLE_RATE)
        to = self._called if speaker in self._callers else self._near
        to[first : first + len(samples)] += scale * samples[: len(to) - first]
        stretches = [(at_s + start, at_s + end) for start, end in said.stretches]
        self.turns += [Turn(*stretch, speaker) for stretch in stretches]
        self._words += _words(said.text, stretches, speaker)
        return at_s + len(samples) / SAMPLE_RATE

    def conversation(self, end_s: float) -> Conversation:
        mixed = self._near[: int(end_s * SAMPLE_RATE)]
        if self._callers:
            mixed = mixed + by_telephone(self._called[: len(mixed)])
        if self._kind.noise_db is not None:
            noise = self._rng.standard_normal(len(mixed)).astype(np.float32)
            noise = sosfilt(butter(1, 1500, fs=SAMPLE_RATE, output="sos"), noise)
            level = LEVEL * 10 ** (-self._kind.noise_db / 20) / np.sqrt((noise**2).mean())
            mixed = (mixed + level * noise).astype(np.float32)
        whole = [
            Turn(*stretch, speaker)
            for speaker in self._speakers
            for stretch in without_pauses([turn[:2] for turn in self.turns if turn.speaker == speaker])
        ]
        return Conversation(mixed, self._speakers, sorted(whole), self._words)


def converse(kind: Kind, seed: int, voices: str = "tuned") -> Conversation:
    """Join a conversation: the same for the same seed."""
    rng = np.random.default_rng([seed, *kind.name.encode()])
    speakers = kind.people(rng, voices)
    least_s, most_s = kind.duration_s
    duration_s = float(rng.uniform(least_s, most_s)) if least_s < most_s else most_s
    stage = _Stage(rng, speakers, kind, duration_s)
    longest_s = min(LONGEST_TURN_S, duration_s / 2)
    at_s, last = float(rng.uniform(0.1, 1)), ""
    while at_s < duration_s:
        choices = [each for each in speakers if each != last] or speakers
        speaker = last = str(rng.choice(choices))
        overlaps = stage.turns and rng.random() < kind.overlap
        if overlaps:
            at_s = max(stage.turns[-1].end_s - rng.uniform(0.4, 2.5), stage.turns[-1].start_s + 0.3)
        wanted_s, start_s = rng.uniform(1, longest_s), at_s
        while True:
            clips = sayings(voices)[speaker]
            at_s = stage.add(clips[rng.integers(len(clips))], speaker, at_s) + rng.uniform(0.05, 0.4)
            if at_s - start_s + 2 > wanted_s:
                break
        at_s += rng.uniform(0.1, 3)
    return stage.conversation(at_s)


def interrupted(seed: int, voices: str = "mixed") -> Conversation:
    """Join one person's 20 to 60 s with three to six interjections of another, and a reference of each."""
    kind = Kind("interjections", _pair)
    rng = np.random.default_rng([seed, *kind.name.encode()])
    while True:
        main, other = kind.people(rng, voices)
        short = [said for said in sayings(voices)[other] if _is_within(said, INTERJECTION_S)]
        longer = {each: _references(sayings(voices)[each]) for each in (main, other)}
        if len(short) > 6 and all(longer.values()):
            break
    duration_s, num_interjections = rng.uniform(20, 60), int(rng.integers(3, 7))
    stage, at_s = _Stage(rng, [main, other], kind, duration_s + 120), 0.3
    interjections: list[Turn] = []
    chosen = rng.permutation(len(short))[:num_interjections]
    for number in chosen:
        until_s = at_s + duration_s / (num_interjections + 1)
        while at_s < until_s:
            clips = sayings(voices)[main]
            at_s = stage.add(clips[rng.integers(len(clips))], main, at_s) + rng.uniform(0.05, 0.5)
        start_s, at_s = at_s, stage.add(short[number], other, at_s)
        interjections.append(Turn(start_s, at_s, other))
        at_s += rng.uniform(0.05, 0.5)
    clips = sayings(voices)[main]
    at_s = stage.add(clips[rng.integers(len(clips))], main, at_s)
    references = {each: longer[each][rng.integers(len(longer[each]))] for each in (main, other)}
    return replace(stage.conversation(at_s + 0.3), interjections=interjections, references=references)


def _is_within(said: Said, bounds_s: tuple[float, float]) -> bool:
    return bounds_s[0] <= sum(end - start for start, end in said.stretches) <= bounds_s[1]


def _references(clips: Sequence[Said]) -> list[Samples]:
    """Return single clips of 4 to 10 s, or else four clips joined."""
    single = [said.samples for said in clips if _is_within(said, REFERENCE_S)]
    joined = np.concatenate([said.samples for said in clips[:4]])[: 10 * SAMPLE_RATE]
    return single or [joined]


def _words(text: str, stretches: Sequence[tuple[float, float]], speaker: str) -> list[Turn]:
    """Words get shares of the speech by their lengths."""
    lengths = np.array([len(word) + 1 for word in re.findall(r"\S+", text)], float)
    if not len(lengths) or not stretches:
        return []
    ends = np.cumsum([end - start for start, end in stretches])
    borders = np.concatenate([[0], np.cumsum(lengths) / lengths.sum()]) * ends[-1]

    def place(spoken_s: float) -> float:
        index = min(int(np.searchsorted(ends, spoken_s)), len(ends) - 1)
        return stretches[index][1] - float(ends[index] - spoken_s)

    return [
        Turn(place(float(start) + 0.01), place(float(end) - 0.01), speaker)
        for start, end in pairwise(borders)
    ]
