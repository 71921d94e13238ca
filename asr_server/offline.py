"""`asr-server transcribe`: the server's pipeline without HTTP."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from asr_server.audio import AudioLimits, PreprocessPool, Recording
from asr_server.checkpoint import resolve_checkpoint
from asr_server.config import Settings
from asr_server.core import DecodingOptions, Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, RequestError
from asr_server.formats import ResponseFormat, render
from asr_server.tokenizer import Tokenizer
from asr_server.transcription import Transcriber
from asr_server.workers.dispatcher import Dispatcher

SUFFIXES = {"text": ".txt", "json": ".json", "verbose_json": ".json", "srt": ".srt", "vtt": ".vtt"}
FILES_AT_ONCE = 16


def transcribe_files(
    settings: Settings,
    files: tuple[Path, ...],
    response_format: ResponseFormat,
    language: str | None,
    output_dir: Path | None,
) -> bool:
    """Writes each transcript, in the order given. False when any file could not be transcribed."""
    return asyncio.run(_Session(settings, response_format, language, output_dir).run(files))


class _Session:
    def __init__(
        self,
        settings: Settings,
        response_format: ResponseFormat,
        language: str | None,
        output_dir: Path | None,
    ) -> None:
        self._response_format = response_format
        self._output_dir = output_dir
        self._limits = AudioLimits.from_settings(settings)
        self._dispatcher = Dispatcher(settings)
        self._pool = PreprocessPool(settings.preprocess_workers)
        tokenizer = Tokenizer.from_directory(resolve_checkpoint(settings.model))
        self._transcriber = Transcriber(self._dispatcher, self._pool, tokenizer)
        self._options = DecodingOptions(
            language=self._transcriber.languages.code(language) if language else None,
            timestamps=True,
            temperatures=settings.temperatures,
        )
        self._at_once = asyncio.Semaphore(FILES_AT_ONCE)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[transcribed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )

    async def run(self, files: tuple[Path, ...]) -> bool:
        await self._dispatcher.start()
        try:
            with self._progress:
                tasks = [asyncio.create_task(self._transcribe(file, self._bar(file))) for file in files]
                return all([self._write(file, await task) for file, task in zip(files, tasks, strict=True)])
        finally:
            await self._dispatcher.stop()
            await asyncio.to_thread(self._pool.shutdown)

    def _bar(self, file: Path) -> TaskID:
        return self._progress.add_task(file.name, total=None, transcribed="waiting")

    async def _transcribe(self, file: Path, bar: TaskID) -> Transcript | str:
        """The transcript, or why there is none."""
        recording = Recording(file, self._limits)
        try:
            async with self._at_once, self._transcriber.transcribe(recording, self._options) as session:
                async for delta in session:
                    done_s = delta.segments[-1].end_s if delta.segments else 0.0
                    self._show(bar, f"{max(done_s, 0):.0f} s of {recording.duration_s:.0f} s decoded")
                transcript = session.transcript()
        except (RequestError, EngineUnavailable) as error:
            self._show(bar, "failed")
            return error.message
        except ChunkFailed as error:
            self._show(bar, "failed")
            return str(error)
        self._show(bar, f"{transcript.duration_s:.1f} s transcribed")
        return transcript

    def _show(self, bar: TaskID, text: str) -> None:
        self._progress.update(bar, transcribed=text)

    def _write(self, file: Path, outcome: Transcript | str) -> bool:
        if isinstance(outcome, str):
            click.echo(f"{file}: {outcome}", err=True)
            return False
        text = render(outcome, self._response_format).rstrip("\n") + "\n"
        if self._output_dir is None:
            sys.stdout.write(text)
            sys.stdout.flush()
            return True
        self._output_dir.mkdir(parents=True, exist_ok=True)
        (self._output_dir / (file.stem + SUFFIXES[self._response_format])).write_text(text)
        return True
