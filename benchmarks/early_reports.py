"""Compare a beam search that its early reports bind with one that is free: words wrong in each.

    python -m benchmarks.early_reports                whisper-base, ten readings of 100 s, short recordings
    python -m benchmarks.early_reports --readings 2 --dtype float32

Every request is read with early reports, streamed or not: what is reported stands. The same recordings are
read once more without any report, so that the search chooses among whole texts.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from asr_server.checkpoint.find import resolve_checkpoint
from asr_server.config import Settings
from asr_server.offline.local import LocalTranscriber, TranscribeJob
from benchmarks.speech import Clip, corpora
from benchmarks.speech.error_rates import Score, total, word_errors
from benchmarks.speech.synthesis import readings

SHORT_CORPORA = ("recordings", "librivox", "cards", "commands", "audioeval")


async def texts_of(transcriber: LocalTranscriber, clips: Sequence[Clip], early_results: bool) -> list[str]:
    async def text_of(clip: Clip) -> str:
        options = transcriber.options_for(clip.language, None)
        options = msgspec.structs.replace(options, early_results=early_results)
        with clip.path.open("rb") as file:
            return (await transcriber.transcribe(file, lambda *_: None, options)).text

    return list(await asyncio.gather(*map(text_of, clips)))


def scores_of(clips: Sequence[Clip], texts: Sequence[str]) -> list[Score]:
    return [
        word_errors(clip.text or "", text, clip.language or "en")
        for clip, text in zip(clips, texts, strict=True)
    ]


async def compare(clips: Sequence[Clip], arguments: argparse.Namespace) -> None:
    model = str(resolve_checkpoint(arguments.model))
    settings = Settings(model=model, executor="inline", dtype=arguments.dtype)
    transcriber = LocalTranscriber(settings, TranscribeJob(()))
    async with transcriber.running():
        bound = await texts_of(transcriber, clips, early_results=True)
        free = await texts_of(transcriber, clips, early_results=False)
    table = Table("search", "words", "wrong", "inserted", "deleted", "error rate")
    for name, texts in (("bound by its reports", bound), ("free", free)):
        score = total(scores_of(clips, texts))
        rate = f"{100 * score.errors / score.num_words:.2f} %"
        cells = (score.num_words, score.errors, score.insertions, score.deletions)
        table.add_row(name, *map(str, cells), rate)
    console = Console()
    console.print(table)
    console.print(f"recordings with another text: {sum(map(str.__ne__, bound, free))} of {len(clips)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--readings", type=int, default=10, help="of 100 s, in a synthetic voice")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    short = [clip for clip in corpora() if clip.corpus in SHORT_CORPORA and clip.text]
    asyncio.run(compare([*readings(arguments.readings), *short], arguments))


if __name__ == "__main__":
    main()
