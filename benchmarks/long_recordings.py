"""Read long recordings of known sentences under conditions, and say what is lost, repeated or mistimed.

    python -m benchmarks.long_recordings                          four kinds, 15 minutes each, whisper-base
    python -m benchmarks.long_recordings --kinds gaps --minutes 3 --seed 2
    python -m benchmarks.long_recordings --quick                  a minute of one kind

A synthetic voice reads sentences at a tempo of 0.8, 1 or 1.2, -18 to -40 dBFS, with pauses of 0.2 to 6 s:

- plain: nothing else;
- distant: in turn in an echo (RT60 of 0.5 s), in pink noise at 10 dB, and over a telephone;
- foreign: a sentence in German, Spanish or French by espeak-ng behind every third (left out without it);
- gaps: between them, 12 to 60 s of music, noise, hum, babble, tones or silence.

Words have the times of the voice's own phonemes where the package onnx is installed (`piper-tts[alignment]`).
"""

import argparse
import asyncio
import difflib
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from asr_server.config import Settings
from asr_server.core import Word
from benchmarks.batch_reader import Read, Reading, Sound, read_all
from harness.real_weights import hugging_face_checkpoint
from harness.speech.error_rates import normalise, word_errors
from harness.speech.long_readings import KINDS, recording
from harness.speech.synthesis import Speech

MIN_RUN: Final = 3  # words in a row that count as lost or invented
START_OFF_S: Final = 1.0
NEAR_S: Final = (0.15, 0.2)  # of a word's start and end


class Found(NamedTuple):
    """What is wrong in a transcript."""

    num_words: int
    errors: int
    lost: list[str]  # runs of words
    invented: list[str]
    said_twice: list[str]
    words_off: list[str]  # more than START_OFF_S outside of their sentence
    starts_off: list[str]  # segments that begin with a sentence, and more than START_OFF_S from it
    errors_s: list[tuple[float, float]]  # of each word of known times: of its start, and of its end

    def near_share(self, near_s: float) -> float:
        return float(np.mean(np.max(self.errors_s, axis=1) <= near_s)) if self.errors_s else float("nan")


class Spoken(NamedTuple):
    word: str
    sentence: int
    is_first: bool  # of its sentence
    time_s: tuple[float, float] | None


class Timed(NamedTuple):
    text: str
    word: Word | None
    segment_start_s: float | None  # of the first word of a segment


Opcode = tuple[str, int, int, int, int]


def compare(speech: Speech, segments: Sequence[Read], is_mixed: bool) -> Found:
    """Compare words; runs over speech in other languages are neither wrong nor invented."""
    truth = list(spoken_words(speech))
    timed = list(timed_words(segments))
    text = " ".join(segment.text.strip() for segment in segments)
    score = word_errors(speech.text, text)
    found = Found(score.num_words, score.errors, [], [], said_twice(segments), [], [], [])
    num_foreign = 0
    for tag, a, b, c, d in aligned(speech, truth, timed):
        if tag == "equal":
            for number, (_, word, start_s) in enumerate(timed[c:d], start=a):
                is_alone = number + 1 == b  # one equal word is no sentence
                compare_times(speech, truth[number], word, None if is_alone else start_s, found)
        elif (b - a) - (d - c) >= MIN_RUN:
            found.lost.append(" ".join(each.word for each in truth[a:b]))
        elif (d - c) - (b - a) >= MIN_RUN and is_mixed:
            num_foreign += (d - c) - (b - a)
        elif (d - c) - (b - a) >= MIN_RUN:
            found.invented.append(" ".join(each.text for each in timed[c:d]))
    return found._replace(errors=found.errors - num_foreign)


def aligned(speech: Speech, truth: Sequence[Spoken], timed: Sequence[Timed]) -> Sequence[Opcode]:
    """Match words; one outside of its sentence gives way to an equal one within.

    Text over another language may repeat the end of a sentence before the next one.
    """
    opcodes = matched(truth, timed, hidden=())
    outside = {a: b for a, b in pairs(opcodes) if is_outside(speech, truth[a], timed[b].word)}
    if not outside:
        return opcodes
    without = matched(truth, timed, hidden=outside.values())
    within = {a for a, b in pairs(without) if not is_outside(speech, truth[a], timed[b].word)}
    return matched(truth, timed, hidden=[b for a, b in outside.items() if a in within])


def matched(truth: Sequence[Spoken], timed: Sequence[Timed], hidden: Collection[int]) -> Sequence[Opcode]:
    texts = ["" if number in hidden else each.text for number, each in enumerate(timed)]
    return difflib.SequenceMatcher(None, [each.word for each in truth], texts, autojunk=False).get_opcodes()


def pairs(opcodes: Sequence[Opcode]) -> Iterator[tuple[int, int]]:
    for tag, a, b, c, d in opcodes:
        if tag == "equal":
            yield from zip(range(a, b), range(c, d), strict=True)


def is_outside(speech: Speech, spoken: Spoken, word: Word | None) -> bool:
    said = speech.sentences[spoken.sentence]
    return word is not None and not (said.start_s - START_OFF_S <= word.start_s <= said.end_s + START_OFF_S)


def spoken_words(speech: Speech) -> Iterator[Spoken]:
    for number, said in enumerate(speech.sentences):
        times_s = said.words_s or (None,) * len(said.text.split())
        is_first = True
        for text, time_s in zip(said.text.split(), times_s, strict=True):
            parts = normalise(text)
            for part in parts:
                yield Spoken(part, number, is_first, time_s if len(parts) == 1 else None)
                is_first = False


def timed_words(segments: Sequence[Read]) -> Iterator[Timed]:
    for segment in segments:
        start_s: float | None = segment.start_s
        for word in segment.words or (None,):
            for part in normalise(word.text if word else segment.text):
                yield Timed(part, word, start_s)
                start_s = None


def compare_times(
    speech: Speech, spoken: Spoken, word: Word | None, segment_start_s: float | None, found: Found
) -> None:
    said = speech.sentences[spoken.sentence]
    if word and is_outside(speech, spoken, word):
        found.words_off.append(f"{spoken.word} at {word.start_s:.2f}, its sentence at {said.start_s:.2f}")
    if segment_start_s is not None and spoken.is_first and abs(segment_start_s - said.start_s) > START_OFF_S:
        found.starts_off.append(f"{spoken.word} at {segment_start_s:.2f}, its sentence at {said.start_s:.2f}")
    if word and spoken.time_s:
        start_s, end_s = spoken.time_s
        found.errors_s.append((abs(word.start_s - start_s), abs(word.end_s - end_s)))


def said_twice(segments: Sequence[Read]) -> list[str]:
    texts = [" ".join(normalise(segment.text)) for segment in segments]
    return [text for before, text in pairwise(texts) if text == before and len(text.split()) >= MIN_RUN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="base")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--no-word-times", action="store_true", help="look at the segments' own times")
    parser.add_argument("--quick", action="store_true", help="a minute of one kind")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kinds, arguments.minutes = ["plain"], 1.0
    speeches = [recording(kind, 60 * arguments.minutes, arguments.seed) for kind in arguments.kinds]
    checkpoint = hugging_face_checkpoint(arguments.model)
    settings = Settings(model=str(checkpoint), executor="inline", dtype=arguments.dtype)
    sounds = [Sound(each.samples) for each in speeches]
    readings = asyncio.run(read_all(settings, sounds, with_words=not arguments.no_word_times))
    show(arguments.kinds, speeches, readings)


def show(kinds: Sequence[str], speeches: Sequence[Speech], readings: Sequence[Reading]) -> None:
    console, names = Console(width=160), ("lost", "invented", "said twice", "words off", "starts off")
    near = [f"within {near_s} s" for near_s in NEAR_S]
    table = Table("recording", "minutes", "words", "wrong", *names, *near, "off: mean, median")
    for kind, speech, reading in zip(kinds, speeches, readings, strict=True):
        found = compare(speech, reading.segments, kind == "foreign")
        lists = found[2:7]
        for name, entries in zip(names, lists, strict=True):
            for entry in entries:
                console.print(f"{kind}: {name}: {entry}", highlight=False)
        counts = (found.num_words, f"{found.errors / found.num_words:.1%}", *map(len, lists))
        shares = [f"{found.near_share(near_s):.1%} of {len(found.errors_s)}" for near_s in NEAR_S]
        off_s = np.array(found.errors_s or [(np.nan, np.nan)])  # starts and ends alike
        off = f"{np.mean(off_s):.3f}, {np.median(off_s):.3f} s"
        table.add_row(kind, f"{speech.duration_s / 60:.1f}", *map(str, counts), *shares, off)
    console.print(table)


if __name__ == "__main__":
    main()
