"""Who speaks: the diarization error rate of conversations joined from recordings of people who are known.

    python -m benchmarks.speakers [--quick] [--seed 2] [--voices tuned|others|mixed|prompts] [--told]

Each conversation has turns of 1 to 15 s and pauses of 0.1 to 3 s between them. The people are two Dutch
actors (fillets-ng-data-nl), a reader of LibriVox, and the voices of flite and piper; the sets differ in how
many people speak, and in what was done to the sound. `--voices others` are two Czech actors, another voice of
flite and the samples of pytest-audioeval. `--voices mixed` are short conversations of two of all of these and
of Asterisk's prompts, and one person's speech with interjections of another; `--voices prompts` are the
prompts' four voices by telephone. Constants were chosen with seed 1 of all: report another.

The error rate is that of dscore and pyannote.metrics, with no collar and overlap scored: time missed,
invented or given to the wrong person over the time spoken, with the best assignment of labels to people.
Words have the times that their places in their clips give them; one counts as wrong where it gets the label
of another person. Those that are said while nobody else speaks are counted by themselves too: where two
speak at once, the time of a word does not say whose it is.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from asr_server.annexes.speakers.labels import SpeakerOfTime, Turn
from asr_server.annexes.speakers.track import SpeakerTrack, reference_embeddings
from asr_server.core import SAMPLE_RATE, Samples, SpeakerCount
from benchmarks.reporting import benchmark_parser, write_json
from harness.speech.conversations import (
    KINDS,
    PHONE_KINDS,
    SHORT_KINDS,
    Conversation,
    Kind,
    conversations,
    interrupted,
)

GRID_S: Final = 0.01  # of the count of errors


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
    label_of = best_labels(conversation, found)
    num_right = np.zeros(real.shape[1], int)
    for name, label in label_of.items():
        num_right += real[their_names.index(name)] & guess[our_names.index(label)]
    num_real, num_guess = real.sum(axis=0), guess.sum(axis=0)
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


def best_labels(conversation: Conversation, found: Sequence[Turn]) -> dict[str, str]:
    """Return the label of each person, by the assignment that gives the most time to the right one."""
    duration_s = len(conversation.samples) / SAMPLE_RATE
    real, their_names = _grid(conversation.turns, duration_s)
    guess, our_names = _grid(found, duration_s)
    rows, columns = linear_sum_assignment(-(real.astype(float) @ guess.T.astype(float)))
    return {their_names[row]: our_names[column] for row, column in zip(rows, columns, strict=True)}


def _grid(turns: Sequence[Turn], duration_s: float) -> tuple[npt.NDArray[np.bool_], list[str]]:
    names = sorted({turn.speaker for turn in turns})
    grid = np.zeros((len(names), round((duration_s + 1) / GRID_S)), bool)
    for turn in turns:
        grid[names.index(turn.speaker), round(turn.start_s / GRID_S) : round(turn.end_s / GRID_S)] = True
    return grid, names


def ours(
    samples: Samples, count: SpeakerCount | None = None, known: Mapping[str, Samples] | None = None
) -> list[Turn]:
    """Return the turns that the server finds; `known` are references by name."""

    async def find() -> list[Turn]:
        track = SpeakerTrack(count, await reference_embeddings(known or {}))
        for first in range(0, len(samples), SAMPLE_RATE):
            track.push(samples[first : first + SAMPLE_RATE])
            await track.wait_for_room()
        return (await track.spoken()).turns

    return asyncio.run(find())


def told(conversation: Conversation) -> SpeakerCount:
    """Return the number of people who speak, as `num_speakers` gives it."""
    num_people = len({turn.speaker for turn in conversation.turns})
    return SpeakerCount(num_people, num_people)


def interjections_right(conversation: Conversation, found: Sequence[Turn], is_named: bool) -> int:
    labels = {each: each for each in conversation.people} if is_named else best_labels(conversation, found)
    speakers = SpeakerOfTime(sorted(found))
    return sum(
        speakers.of(turn.start_s, turn.end_s) == labels.get(turn.speaker)
        for turn in conversation.interjections
    )


def show_interjections(seed: int, number: int) -> None:
    """Print how many interjections get the right speaker: alone, with their number, with references."""
    talks = [interrupted(1000 * seed + each) for each in range(number)]
    total = sum(len(talk.interjections) for talk in talks)
    for name, counts, knows in (
        ("nothing given", False, False),
        ("num_speakers", True, False),
        ("references", False, True),
        ("both", True, True),
    ):
        right = sum(
            interjections_right(
                talk,
                ours(talk.samples, told(talk) if counts else None, talk.references if knows else None),
                is_named=knows,
            )
            for talk in talks
        )
        print(f"interjections of 1 to 1.8 s, {name}: {right} of {total} right")


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
        "words_wrong": sum(each.num_wrong_words for each in found)
        / max(1, sum(each.num_words for each in found)),
        "alone_wrong": sum(each.num_wrong_alone for each in found)
        / max(1, sum(each.num_words_alone for each in found)),
        "seconds_per_hour": work_s / audio_s * 3600,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("DER", "missed", "invented", "confused", "count right", "words wrong", "alone", "s an hour")
    table = Table("set", "system", *columns)
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in ("error_rate", "missed", "invented", "confused")]
        right = f"{row['count_right']} of {row['conversations']}"
        words = [f"{row[key]:.1%}" for key in ("words_wrong", "alone_wrong")]
        table.add_row(row["set"], row["system"], *shares, right, *words, f"{row['seconds_per_hour']:.0f}")
    Console(width=140).print(table)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="two conversations of each set")
    parser.add_argument("--conversations", type=int, default=10, help="of each set")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--voices", choices=("tuned", "others", "mixed", "prompts"), default="tuned")
    parser.add_argument("--told", action="store_true", help="ours once more, with the number of people")
    options = parser.parse_args()
    systems: dict[str, Callable[[Conversation], list[Turn]]] = {"asr-server": lambda each: ours(each.samples)}
    if options.told:
        systems["with num_speakers"] = lambda each: ours(each.samples, told(each))
    rows, losses = [], list[float]()
    number = 2 if options.quick else options.conversations
    for kind in {"mixed": SHORT_KINDS, "prompts": PHONE_KINDS}.get(options.voices, KINDS):
        talks = conversations(kind, 1000 * options.seed, number, options.voices)
        audio_s = sum(len(each.samples) for each in talks) / SAMPLE_RATE
        rates: dict[str, list[float]] = {}
        for system, find_turns in systems.items():
            started_at = time.monotonic()
            found = [find_turns(each) for each in talks]
            work_s = time.monotonic() - started_at
            scored = [errors(each, turns) for each, turns in zip(talks, found, strict=True)]
            rates[system] = [each.rate for each in scored]
            rows.append(summary(kind, system, scored, work_s, audio_s))
        if options.told:
            pairs = zip(rates["asr-server"], rates["with num_speakers"], strict=True)
            losses += [with_number - without for without, with_number in pairs]
    show(rows)
    if losses:
        num_worse = sum(loss > 0.01 for loss in losses)
        print(
            f"with num_speakers more than a point worse in {num_worse} of {len(losses)} conversations, "
            f"by {100 * max(losses):.1f} points at most"
        )
    if options.voices == "mixed":
        show_interjections(options.seed, number)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
