"""Read long recordings of known sentences under conditions, and say what is lost, repeated or mistimed.

    python -m benchmarks.long_recordings                          four kinds, 15 minutes each, whisper-base
    python -m benchmarks.long_recordings --kinds gaps --minutes 3 --seed 2

A synthetic voice reads sentences at a tempo of 0.8, 1 or 1.2, -18 to -40 dBFS, with pauses of 0.2 to 6 s:

- plain: nothing else;
- distant: in turn in an echo (RT60 of 0.5 s), in pink noise at 10 dB, and over a telephone;
- foreign: a sentence in German, Spanish or French by espeak-ng behind every third (left out without it);
- gaps: between them, 12 to 60 s of music, noise, hum, babble, tones or silence.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import io
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import soundfile
import soxr
from rich.console import Console
from rich.table import Table
from scipy.signal import fftconvolve

from asr_server.checkpoint.find import resolve_checkpoint
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Samples, Transcript
from asr_server.offline.local import LocalTranscriber, TranscribeJob
from benchmarks.speech.error_rates import normalise, word_errors
from benchmarks.speech.noises import make_noise
from benchmarks.speech.synthesis import SaidSentence, Speech, say, sentences
from benchmarks.speech.telephone import by_telephone

KINDS: Final = ("plain", "distant", "foreign", "gaps")
TEMPOS: Final = (0.8, 1.0, 1.2)
GAPS: Final = ("music", "pink", "hum", "babble", "tones", "silence")
FOREIGN: Final = (
    ("de", "Morgen wird es in den Bergen regnen, und wir bleiben zu Hause."),
    ("es", "Los barcos salieron del puerto antes de que llegara la tormenta."),
    ("fr", "Nous avons marché toute la journée dans la forêt sans voir personne."),
)
MIN_RUN: Final = 3  # words in a row that count as lost or invented
START_OFF_S: Final = 1.0

Random = np.random.Generator


def recording(kind: str, duration_s: float, seed: int) -> Speech:
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    texts = list(rng.permutation(np.array(sentences(), object)))
    parts, said, num_samples = [silence(0.5)], list[SaidSentence](), SAMPLE_RATE // 2
    while num_samples < duration_s * SAMPLE_RATE and texts:
        spoken = at_level(say(texts[-1], float(rng.choice(TEMPOS))), rng.uniform(-40, -18))
        spoken = distant(spoken, len(said), rng) if kind == "distant" else spoken
        start_s = num_samples / SAMPLE_RATE
        said.append(SaidSentence(texts.pop(), start_s, start_s + len(spoken) / SAMPLE_RATE))
        parts += [spoken, *between(kind, len(said), rng)]
        num_samples = sum(map(len, parts))
    return Speech(np.concatenate(parts), tuple(said))


def between(kind: str, number: int, rng: Random) -> Iterator[Samples]:
    """What follows the sentence with this number, counted from 1."""
    yield silence(float(np.exp(rng.uniform(np.log(0.2), np.log(6.0)))))
    if kind == "gaps" and number % 4 == 0:
        yield make_noise(GAPS[number // 4 % len(GAPS)], -30, rng.uniform(12, 60), number)
    if kind == "foreign" and number % 3 == 0 and shutil.which("espeak-ng"):
        yield at_level(foreign(*FOREIGN[number // 3 % len(FOREIGN)]), -25)
        yield silence(rng.uniform(0.3, 1.5))


def silence(duration_s: float) -> Samples:
    return np.zeros(round(duration_s * SAMPLE_RATE), np.float32)


def at_level(samples: Samples, level_db: float) -> Samples:
    level = float(np.sqrt(np.mean(samples**2)))
    return np.asarray(samples * (10 ** (level_db / 20) / level), np.float32)


def distant(samples: Samples, number: int, rng: Random) -> Samples:
    way: Callable[[], Samples] = (
        lambda: echoing(samples, rng),
        lambda: (
            samples
            + at_level(make_noise("pink", -30, len(samples) / SAMPLE_RATE, number), level_db(samples) - 10)
        ),
        lambda: by_telephone(samples),
    )[number % 3]
    return np.asarray(way(), np.float32)


def level_db(samples: Samples) -> float:
    return float(10 * np.log10(np.mean(samples**2)))


def echoing(samples: Samples, rng: Random) -> Samples:
    """In a room whose echo falls by 60 dB in half a second."""
    times_s = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    room = rng.standard_normal(len(times_s)) * 10 ** (-3 * times_s / 0.5) * 0.05
    room[0] = 1.0
    return np.asarray(fftconvolve(samples, room)[: len(samples)], np.float32)


def foreign(language: str, text: str) -> Samples:
    raw = subprocess.run(["espeak-ng", "-v", language, "--stdout", text], check=True, capture_output=True)
    samples, rate_hz = soundfile.read(io.BytesIO(raw.stdout), dtype="float32")
    return np.asarray(soxr.resample(samples, rate_hz, SAMPLE_RATE), np.float32)


class Found(NamedTuple):
    """What is wrong in a transcript."""

    num_words: int
    errors: int
    lost: list[str]  # runs of words
    invented: list[str]
    said_twice: list[str]
    late_or_early: list[str]  # sentences whose first word is more than START_OFF_S off


def compare(speech: Speech, transcript: Transcript, is_mixed: bool) -> Found:
    """Compare words; what is said in other languages counts as invented nowhere."""
    truth = [(word, n) for n, said in enumerate(speech.sentences) for word in normalise(said.text)]
    timed = [(part, word) for word in transcript.words for part in normalise(word.text)]
    matcher = difflib.SequenceMatcher(None, [w for w, _ in truth], [w for w, _ in timed], autojunk=False)
    lost, invented, off = list[str](), list[str](), list[str]()
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "delete" and b - a >= MIN_RUN:
            lost.append(" ".join(word for word, _ in truth[a:b]))
        if tag == "insert" and d - c >= MIN_RUN and not is_mixed:
            invented.append(" ".join(word for word, _ in timed[c:d]))
        if tag == "equal":
            for (word, n), (_, found) in zip(truth[a:b], timed[c:d], strict=True):
                said = speech.sentences[n]
                if not said.start_s - START_OFF_S <= found.start_s <= said.end_s + START_OFF_S:
                    off.append(f"{word} at {found.start_s:.2f}, its sentence at {said.start_s:.2f}")
    texts = [" ".join(normalise(segment.text)) for segment in transcript.segments]
    twice = [text for before, text in pairwise(texts) if text == before and len(text.split()) >= MIN_RUN]
    score = word_errors(speech.text, transcript.text)
    return Found(score.num_words, score.errors, lost, invented, twice, off)


async def read(settings: Settings, speeches: dict[str, Speech]) -> dict[str, Transcript]:
    transcriber = LocalTranscriber(settings, TranscribeJob((), language="en", word_timestamps=True))
    async with transcriber.running():
        texts = {}
        for kind, speech in speeches.items():
            with tempfile.TemporaryFile() as file:
                soundfile.write(file, speech.samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
                file.seek(0)
                texts[kind] = await transcriber.transcribe(file, lambda *_: None, transcriber.options)
        return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="base")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    speeches = {kind: recording(kind, 60 * arguments.minutes, arguments.seed) for kind in arguments.kinds}
    model = str(resolve_checkpoint(arguments.model))
    settings = Settings(model=model, executor="inline", dtype=arguments.dtype)
    transcripts = asyncio.run(read(settings, speeches))
    console = Console(width=160)
    table = Table(
        "recording", "minutes", "words", "wrong", "runs lost", "runs invented", "said twice", "words off"
    )
    for kind, transcript in transcripts.items():
        found = compare(speeches[kind], transcript, kind == "foreign")
        lists = (found.lost, found.invented, found.said_twice, found.late_or_early)
        counts = (found.num_words, found.errors, *map(len, lists))
        table.add_row(kind, f"{speeches[kind].duration_s / 60:.1f}", *map(str, counts))
        for name, entries in zip(("lost", "invented", "twice", "off"), lists, strict=True):
            for entry in entries:
                console.print(f"{kind}: {name}: {entry}")
    console.print(table)


if __name__ == "__main__":
    main()
