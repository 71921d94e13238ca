"""Measure what keywords bring and cost: names found, errors elsewhere, words in silence.

    python -m benchmarks.keywords                       all of it, whisper-base
    python -m benchmarks.keywords --parts names         one part
    python -m benchmarks.keywords --quick               a tenth of it, to see that it works

- names: a synthetic voice says 40 rare names in two sentences each; 64 keywords, these among them;
- elsewhere: recordings of people and of sentences read aloud, in which none of the keywords occurs;
  "texts changed" counts those that keywords change (--dtype float32: by keywords alone);
- nothing: forty minutes without a word.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Samples
from asr_server.transcription.request import boosted_keywords
from benchmarks.batch_reader import Sound, read_all
from benchmarks.reporting import benchmark_parser, command, machine, write_json
from harness import speech
from harness.speech.corpora import known_clips
from harness.speech.error_rates import normalise, total, word_errors
from harness.speech.synthesis import readings, say

KEYWORDS: Final = tuple((Path(speech.__file__).parent / "keywords.txt").read_text("utf-8").split())
NAMES: Final = KEYWORDS[:40]  # the others are said nowhere
SENTENCES: Final = (
    "Yesterday I asked about {} again, but nobody in the office knew.",
    "Please write to {} before the end of the week.",
)
WAYS: Final = {"none": {}, "keywords": {"keywords": boosted_keywords(KEYWORDS)}}
CORPORA: Final = ("recordings", "librivox", "cards", "audioeval", "fillets")
Recordings = Sequence[tuple[Samples, str]]  # with the language of each
Texts = dict[str, list[str]]  # by way
Read = Callable[[Recordings], Texts]
Figures = dict[str, dict[str, Any]]  # by way


def spoken_names(names: Sequence[str]) -> list[tuple[str, str, Samples]]:
    """Return each name with the sentence around it and its sound."""
    pause = np.zeros(SAMPLE_RATE // 3, np.float32)
    return [
        (name, sentence, np.concatenate([pause, say(sentence.format(name)), pause]))
        for sentence in SENTENCES
        for name in names
    ]


def is_in(name: str, text: str) -> bool:
    return f" {' '.join(normalise(name))} " in f" {' '.join(normalise(text))} "


def _without(name: str, text: str) -> str:
    return " ".join(normalise(text)).replace(" ".join(normalise(name)), "")


def measure_names(read: Read, options: argparse.Namespace) -> Figures:
    spoken = spoken_names(NAMES[: options.names])
    figures: Figures = {}
    for way, texts in read([(samples, "en") for _, _, samples in spoken]).items():
        answers = list(zip(spoken, texts, strict=True))
        right = [
            word_errors(_without(name, sentence.format(name)), _without(name, text))
            for (name, sentence, _), text in answers
            if is_in(name, text)
        ]
        figures[way] = {
            "recall": len(right) / len(spoken),
            "other words wrong": sum(score.errors for score in right),
            "missed": [(name, text) for (name, *_), text in answers if not is_in(name, text)],
        }
    return figures


def measure_elsewhere(read: Read, options: argparse.Namespace) -> Figures:
    clips = [*known_clips(CORPORA, options.most), *readings(options.readings)]
    figures: Figures = {}
    by_way = read([(clip.samples(), clip.language) for clip in clips])
    for way, texts in by_way.items():
        scores = {
            corpus: total(
                word_errors(clip.text or "", text, clip.language)
                for clip, text in zip(clips, texts, strict=True)
                if corpus in ("all", clip.corpus)
            )
            for corpus in (*dict.fromkeys(clip.corpus for clip in clips), "all")
        }
        figures[way] = {
            corpus: {"errors": score.errors, "words": score.num_words} for corpus, score in scores.items()
        }
        figures[way]["texts changed"] = sum(map(operator.ne, texts, by_way["none"]))
        figures[way]["keywords invented"] = sum(is_in(name, text) for name in KEYWORDS for text in texts)
    return figures


def measure_nothing(read: Read, options: argparse.Namespace) -> Figures:
    clips = known_clips(["noises"], options.noises)
    by_way = read([(clip.samples(), "en") for clip in clips])
    return {
        way: {"recordings": len(clips), "words": sum(len(text.split()) for text in texts)}
        for way, texts in by_way.items()
    }


MEASURE: Final = {"names": measure_names, "elsewhere": measure_elsewhere, "nothing": measure_nothing}


def show(figures: Mapping[str, Figures], console: Console) -> None:
    for part, by_way in figures.items():
        shown = [name for name in next(iter(by_way.values())) if name != "missed"]
        table = Table(part, *shown)
        for way, own in by_way.items():
            table.add_row(way, *(_cell(own[name]) for name in shown))
        console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['errors']} of {value['words']} ({value['errors'] / max(1, value['words']):.2%})"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    options = arguments()
    console = Console(stderr=True, width=180)
    console.print(command(), machine())
    settings = Settings(model=str(resolve_checkpoint(options.model)), executor="inline", dtype=options.dtype)

    def read(recordings: Recordings) -> Texts:
        return {
            way: [
                reading.text
                for reading in asyncio.run(read_all(settings, [Sound(*each, own) for each in recordings]))
            ]
            for way, own in WAYS.items()
        }

    figures = {part: MEASURE[part](read, options) for part in options.parts}
    show(figures, console)
    write_json(options.json, figures)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--parts", nargs="+", choices=MEASURE, default=list(MEASURE))
    parser.add_argument("--names", type=int, default=len(NAMES))
    parser.add_argument("--most", type=int, default=100, help="recordings of each corpus")
    parser.add_argument("--readings", type=int, default=8, help="of 100 s each")
    parser.add_argument("--noises", type=int, default=1000, help="recordings without a word")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.names, options.most, options.readings, options.noises = 4, 4, 1, 8
    return options


if __name__ == "__main__":
    main()
