"""A recording through the server's own pipeline, without HTTP, on any checkpoint in float32."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import soundfile

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import PreprocessPool, Recording
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Chunk, DecodingOptions, Samples, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.transcription.transcriber import Transcriber
from tests.support.embedded import embedded
from tests.support.memory_file import MemoryFile


class Pipeline:
    """Takes recordings through one engine."""

    def __init__(self, checkpoint: Path, check_voice: bool, **other: Any) -> None:
        common: dict[str, Any] = {"executor": "inline", "dtype": "float32", "beam_size": 1}
        settings = Settings(model=str(checkpoint), **common | other)
        window = read_window(checkpoint)
        self.limits = AudioLimits.from_settings(settings, window)
        self.dispatcher, self.pool = Dispatcher(settings, window=window), PreprocessPool(1)
        tokenizer = Tokenizer.from_directory(checkpoint)
        self.transcriber = Transcriber(self.dispatcher, self.pool, tokenizer, check_voice)

    async def transcribe(self, sound: Samples, options: DecodingOptions) -> Transcript:
        recording = Recording(MemoryFile(wav(sound)), self.limits)
        async with self.transcriber.run(recording, options) as transcription:
            async for _ in transcription:
                pass
            return await transcription.transcript()


@asynccontextmanager
async def running_pipeline(
    checkpoint: Path, check_voice: bool = False, **other: Any
) -> AsyncIterator[Pipeline]:
    """
    Args:
        check_voice: not for random weights: what they say is always in doubt.
        other: settings.
    """
    pipeline = Pipeline(checkpoint, check_voice, **other)
    await pipeline.dispatcher.start()
    try:
        yield pipeline
    finally:
        await pipeline.dispatcher.stop()
        await asyncio.to_thread(pipeline.pool.shutdown)


async def transcribe(
    checkpoint: Path, sound: Samples, options: DecodingOptions, check_voice: bool = False
) -> Transcript:
    """Transcribe one recording. Where there are several, `running_pipeline` loads the weights once."""
    async with running_pipeline(checkpoint, check_voice) as pipeline:
        return await pipeline.transcribe(sound, options)


def wav(sound: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, SAMPLE_RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


def chunks_of(checkpoint: Path, sound: Samples) -> list[Chunk]:
    limits = AudioLimits.from_settings(embedded(), read_window(checkpoint))
    with Recording(MemoryFile(wav(sound)), limits) as recording:
        finished, chunks = False, list[Chunk]()
        while not finished:
            more, finished = recording.next_slice(4)
            chunks += more
    return chunks
