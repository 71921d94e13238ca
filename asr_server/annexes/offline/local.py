"""Transcribe one recording with the pipeline of this process; `remote.py` does it elsewhere."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol, Self, TypeVar

import msgspec

from asr_server.annexes.speakers.track import SpeakerTrack
from asr_server.audio.decoder import AudioLimits, parse_choice
from asr_server.audio.recording import PreprocessPool, Recording, Source
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import DEFAULT_MODEL, EMBEDDED_MODEL_LIMIT, Settings
from asr_server.core import Clip, DecodingOptions, SpeakerCount, Task, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidValue
from asr_server.formats.render import FORMATS, FileFormat, RenderOptions
from asr_server.formats.subtitles import READABLE_LAYOUT, SubtitleLayout
from asr_server.transcription.transcriber import Transcriber, prompt_tokens, task_group

FILES_AT_ONCE: Final = 16
Existing = Literal["refuse", "skip", "overwrite"]  # what happens to a file whose result is there already
T = TypeVar("T")


async def work_through(items: Iterator[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Work on some items at a time. A thread takes each from the iterator, which may read a disk."""
    taking = asyncio.Lock()

    async def work_on() -> None:
        while True:
            async with taking:
                item = await asyncio.to_thread(next, items, None)
            if item is None:
                return
            await work(item)

    async with task_group() as group:
        for _ in range(FILES_AT_ONCE):
            group.create_task(work_on())


@dataclass(frozen=True)
class TranscribeJob:
    arguments: tuple[str, ...]  # files, folders, "-" for standard input
    formats: tuple[FileFormat, ...] = ("text",)
    output_dir: Path | None = None  # None: standard output
    existing: Existing = "refuse"
    recursive: bool = False
    quiet: bool = False
    language: str | None = None  # as the user wrote it; None: detected
    task: Task = "transcribe"
    prompt: str = ""
    hotwords: tuple[str, ...] = ()
    temperature: float = 0.0  # 0: from 0 up, as far as it takes
    word_timestamps: bool = False
    condition_on_previous_text: bool = False
    multilingual: bool = False
    layout: SubtitleLayout = READABLE_LAYOUT
    speakers: tuple[str, ...] = ()  # of each channel; empty: the channels are mixed
    track: str = ""  # a number, a language, or with channels apart two numbers; empty: the file's default
    clips: tuple[Clip, ...] = ()  # in order; empty: all of each recording
    voices: SpeakerCount | None = None  # tell so many apart; None: no voices are told apart
    manifest: Path | None = None  # instead of arguments: JSON lines, each of which names a recording
    background: bool = False  # on a server elsewhere, as jobs that go on without this process

    @property
    def needs_words(self) -> bool:
        return self.render_options.needs_words(self.formats) or self.voices is not None

    @property
    def is_text_only(self) -> bool:
        shows_segments = any(FORMATS[name].shows_segments for name in self.formats)
        return not (self.needs_words or self.speakers or shows_segments)

    @property
    def render_options(self) -> RenderOptions:
        return RenderOptions(with_words=self.word_timestamps, layout=self.layout)


OnProgress = Callable[[float, float | None], None]  # seconds transcribed, and in all where that is known


class FileTranscriber(Protocol):
    @property
    def model(self) -> str: ...

    def running(self) -> AbstractAsyncContextManager[object]:
        """Start and end what it needs. Raises EngineUnavailable, InvalidValue."""
        ...

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        """Transcribe one of many concurrent files.

        Raises RequestError, ChunkFailed, OSError for this file, EngineUnavailable, InvalidValue for all.
        """
        ...


class LocalTranscriber:
    def __init__(self, settings: Settings, job: TranscribeJob) -> None:
        directory = Path(settings.model)
        window, tokenizer = read_window(directory), Tokenizer.from_directory(directory)
        self._limits = AudioLimits.from_settings(settings, window)
        self._dispatcher = Dispatcher(settings, window=window)
        self._pool = PreprocessPool(settings.preprocess_workers)
        self.transcriber = Transcriber(self._dispatcher, self._pool, tokenizer, settings.check_voice)
        self._job, self._choice = job, parse_choice(job.track, bool(job.speakers))
        self._stands_in = bool(settings.why_embedded)
        self.model = settings.model_names[0]
        if job.task == "translate" and not self.transcriber.can_translate:
            raise InvalidValue(f"The model {settings.served_model_name} cannot translate.", "task")
        self.options = self.transcriber.options(
            task=job.task,
            language=job.language,
            prompt=job.prompt,
            keywords=job.hotwords,
            temperature=job.temperature,
            word_timestamps=job.needs_words,
            text_only=job.is_text_only,
            condition_on_previous_text=job.condition_on_previous_text,
            multilingual=job.multilingual,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Finish recordings in order, so that an interruption leaves most results."""
        self._dispatcher.serve_in_order()
        await self._dispatcher.start()
        try:
            yield self
        finally:
            await self._dispatcher.stop()
            await asyncio.to_thread(self._pool.shutdown)

    async def transcribe(
        self, source: Source, on_progress: OnProgress, options: DecodingOptions | None = None
    ) -> Transcript:
        """Raises ChunkFailed if a model that nobody chose recognised nothing."""
        recording, own = self.recording(source, self._job.clips), options or self.options
        track = SpeakerTrack(self._job.voices) if self._job.voices else None
        try:
            async with self.transcriber.run(recording, own, self._job.speakers, track) as transcription:
                async for delta in transcription:
                    on_progress(delta.end_s, recording.expected_duration_s)
                transcript = await transcription.transcript()
        except EngineUnavailable as error:
            supervisor = self._dispatcher.supervisor
            if not supervisor.failed_to_start:
                raise
            reason = f"the engine could not be started: {supervisor.last_failure}"
            raise EngineUnavailable(reason) from error
        if self._stands_in and not transcript.text:
            raise ChunkFailed(
                f"no speech recognised: {self.model}, in the place of {DEFAULT_MODEL}, {EMBEDDED_MODEL_LIMIT}"
            )
        return transcript

    def recording(self, source: Source, clips: Sequence[Clip]) -> Recording:
        return Recording(source, self._limits, bool(self._job.speakers), choice=self._choice, clips=clips)

    def options_for(self, language: str | None, prompt: str | None) -> DecodingOptions:
        """Raises InvalidValue."""
        own = self.options
        if language is not None:
            own = msgspec.structs.replace(own, language=self.transcriber.languages.given_code(language))
        if prompt is not None:
            tokens = prompt_tokens(self.transcriber.tokenizer, prompt)
            own = msgspec.structs.replace(own, prompt_tokens=tokens)
        return own
