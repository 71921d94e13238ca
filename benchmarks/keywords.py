"""Measure what keywords bring and cost: names found, errors elsewhere, words in silence, time.

    python -m benchmarks.keywords                       all of it, whisper-base
    python -m benchmarks.keywords --parts names --ways none boost
    python -m benchmarks.keywords --parts names elsewhere --ways boost --bonuses 1,2 2,3
    python -m benchmarks.keywords --quick               a tenth of it, to see that it works

- names: a synthetic voice says 40 rare names in two sentences each; 64 keywords, these among them;
- elsewhere: recordings of people and of sentences read aloud, in which none of the keywords occurs;
  "texts changed" counts those that differ from the first way's (--dtype float32: by keywords alone);
- nothing: forty minutes without a word;
- speed: the recordings of `elsewhere`, with keywords and without in turns.

The ways: without keywords, in the prompt alone, by a bonus in decoding alone (as served), and by both.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import soundfile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.checkpoint.find import resolve_checkpoint
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, DecodingOptions, Samples
from asr_server.engine import boost
from asr_server.offline.local import LocalTranscriber, TranscribeJob
from asr_server.transcription import boosted_keywords
from benchmarks import speech
from benchmarks.reporting import benchmark_parser, command, machine, write_json
from benchmarks.speech.corpora import Clip, known_clips
from benchmarks.speech.error_rates import Score, normalise, total, word_errors
from benchmarks.speech.synthesis import readings, say

KEYWORDS: Final = tuple((Path(speech.__file__).parent / "keywords.txt").read_text("utf-8").split())
NAMES: Final = KEYWORDS[:40]  # the others are said nowhere
SENTENCES: Final = (
    "Yesterday I asked about {} again, but nobody in the office knew.",
    "Please write to {} before the end of the week.",
)
WAYS: Final = ("none", "prompt", "boost", "both")
PARTS: Final = ("names", "elsewhere", "nothing", "speed")
SERVED_BONUSES: Final = boost.FIRST_BONUS, boost.NEXT_BONUS
MOST_IN_PROMPT: Final = 110  # tokens: half of a prompt
AT_ONCE: Final = 16
CORPORA: Final = ("recordings", "librivox", "cards", "audioeval", "fillets")


class Reader:
    """Reads recordings in one of the ways."""

    def __init__(self, transcriber: LocalTranscriber, tokenizer: Tokenizer) -> None:
        self._transcriber = transcriber
        self._tokenizer = tokenizer

    def options(self, way: str, language: str) -> DecodingOptions:
        options = self._transcriber.options_for(language, None)
        if way in ("prompt", "both"):
            listed = self._tokenizer.encode(" " + ", ".join(KEYWORDS))[:MOST_IN_PROMPT]
            tokens = (*listed, *self._tokenizer.encode("."))
            options = msgspec.structs.replace(options, prompt_tokens=tokens)
        if way in ("boost", "both"):
            options = msgspec.structs.replace(options, keywords=boosted_keywords(KEYWORDS))
        return options

    async def read(self, sounds: Sequence[tuple[Samples, str]], way: str, progress: Progress) -> list[str]:
        """Return the text of each recording, given with its language."""
        bar = progress.add_task(way, total=len(sounds))
        way, _, bonuses = way.partition(" ")
        set_bonuses(bonuses)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(samples: Samples, language: str) -> str:
            async with places:
                with tempfile.TemporaryFile() as file:
                    soundfile.write(file, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
                    file.seek(0)
                    options = self.options(way, language)
                    transcript = await self._transcriber.transcribe(file, lambda *_: None, options)
            progress.advance(bar)
            return transcript.text

        return await asyncio.gather(*(one(*sound) for sound in sounds))


def set_bonuses(first_and_next: str) -> None:
    """Set the bonus of a keyword's first token and of each further one; those of the server if empty."""
    given = map(float, first_and_next.split(",")) if first_and_next else SERVED_BONUSES
    boost.FIRST_BONUS, boost.NEXT_BONUS = given  # type: ignore[misc]
    boost.keyword_boost.cache_clear()


def spoken_names(names: Sequence[str]) -> list[tuple[str, Samples]]:
    pause = np.zeros(SAMPLE_RATE // 3, np.float32)
    return [
        (name, np.concatenate([pause, say(sentence.format(name)), pause]))
        for sentence in SENTENCES
        for name in names
    ]


def is_in(name: str, text: str) -> bool:
    return f" {' '.join(normalise(name))} " in f" {' '.join(normalise(text))} "


Figures = dict[str, dict[str, Any]]  # by way


async def measure_names(reader: Reader, options: argparse.Namespace, progress: Progress) -> Figures:
    spoken = spoken_names(NAMES[: options.names])
    figures: Figures = {}
    for way in options.ways:
        texts = await reader.read([(samples, "en") for _, samples in spoken], way, progress)
        missed = [
            (name, text) for (name, _), text in zip(spoken, texts, strict=True) if not is_in(name, text)
        ]
        said_without = [
            word_errors(_without(name, sentence.format(name)), _without(name, text))
            for (name, _), text, sentence in zip(
                spoken, texts, [each for each in SENTENCES for _ in NAMES[: options.names]], strict=True
            )
            if is_in(name, text)
        ]
        figures[way] = {
            "recall": 1 - len(missed) / len(spoken),
            "other words wrong": sum(score.errors for score in said_without),
            "missed": missed,
        }
    return figures


def _without(name: str, text: str) -> str:
    return " ".join(normalise(text)).replace(" ".join(normalise(name)), "")


async def measure_elsewhere(reader: Reader, options: argparse.Namespace, progress: Progress) -> Figures:
    clips = _clips(options)
    sounds = [(clip.samples(), clip.language) for clip in clips]
    figures: Figures = {}
    first_texts: list[str] = []
    for way in options.ways:
        texts = await reader.read(sounds, way, progress)
        scores: dict[str, list[Score]] = {}
        for clip, text in zip(clips, texts, strict=True):
            group = "fillets" if clip.corpus == "fillets" else clip.corpus
            scores.setdefault(group, []).append(word_errors(clip.text or "", text, clip.language))
        summed = {group: total(own) for group, own in scores.items()}
        figures[way] = {
            group: {"errors": score.errors, "words": score.num_words} for group, score in summed.items()
        }
        first_texts = first_texts or texts
        figures[way]["texts changed"] = sum(map(operator.ne, texts, first_texts))
        everything = total(score for own in scores.values() for score in own)
        figures[way]["all"] = {"errors": everything.errors, "words": everything.num_words}
        figures[way]["keywords invented"] = sum(is_in(name, text) for name in KEYWORDS for text in texts)
    return figures


def _clips(options: argparse.Namespace) -> list[Clip]:
    return [*known_clips(CORPORA, options.most), *readings(options.readings)]


async def measure_nothing(reader: Reader, options: argparse.Namespace, progress: Progress) -> Figures:
    clips = known_clips(["noises"], options.noises)
    sounds = [(clip.samples(), "en") for clip in clips]
    figures: Figures = {}
    for way in options.ways:
        texts = await reader.read(sounds, way, progress)
        figures[way] = {"recordings": len(clips), "words": sum(len(text.split()) for text in texts)}
    return figures


async def measure_speed(reader: Reader, options: argparse.Namespace, progress: Progress) -> Figures:
    sounds = [(clip.samples(), clip.language) for clip in _clips(options)]
    seconds: Mapping[str, list[float]] = {way: [] for way in options.ways}
    for number in range(options.rounds + 1):
        for way in options.ways if number % 2 else reversed(options.ways):
            started = time.process_time()
            await reader.read(sounds, way, progress)
            if number:  # the first one warms up
                seconds[way].append(time.process_time() - started)
    first = options.ways[0]
    return {
        way: {
            "processor_s": own,
            "percent more": 100 * (statistics.median(map(_ratio, own, seconds[first])) - 1),
        }
        for way, own in seconds.items()
    }


def _ratio(own: float, other: float) -> float:
    return own / other


MEASURE: Final = {
    "names": measure_names,
    "elsewhere": measure_elsewhere,
    "nothing": measure_nothing,
    "speed": measure_speed,
}


async def measure(options: argparse.Namespace, console: Console) -> dict[str, Figures]:
    directory = Path(resolve_checkpoint(options.model))
    settings = Settings(
        model=str(directory), executor="inline", dtype=options.dtype, beam_size=options.beam_size
    )
    transcriber = LocalTranscriber(settings, TranscribeJob((), language="en"))
    figures: dict[str, Figures] = {}
    async with transcriber.running():
        reader = Reader(transcriber, Tokenizer.from_directory(directory))
        with Progress(console=console) as progress:
            for part in options.parts:
                figures[part] = await MEASURE[part](reader, options, progress)
    return figures


def show(figures: Mapping[str, Figures], console: Console) -> None:
    for part, by_way in figures.items():
        shown = [name for name in next(iter(by_way.values())) if name not in ("missed", "processor_s")]
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
    figures = asyncio.run(measure(options, console))
    show(figures, console)
    write_json(options.json, figures)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--beam-size", type=int, default=Settings().beam_size)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--bonuses", nargs="+", default=[], metavar="FIRST,NEXT", help="try these instead of the server's"
    )
    parser.add_argument("--names", type=int, default=len(NAMES))
    parser.add_argument("--most", type=int, default=100, help="recordings of each corpus")
    parser.add_argument("--readings", type=int, default=8, help="of 100 s each")
    parser.add_argument("--noises", type=int, default=1000, help="recordings without a word")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.names, options.most, options.readings, options.noises, options.rounds = 4, 4, 1, 8, 1
    if options.bonuses:
        tried = {way: [f"{way} {each}" for each in options.bonuses] for way in ("boost", "both")}
        options.ways = [own for way in options.ways for own in tried.get(way, [way])]
    return options


if __name__ == "__main__":
    main()
