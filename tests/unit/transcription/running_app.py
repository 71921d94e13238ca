"""A transcriber between a real pool and a replica that a test speaks for."""

from collections.abc import Callable

import numpy as np

from asr_server.audio.recording import PreprocessPool, Recording
from asr_server.core import ChunkResult, DecodingOptions, Transcript, TranscriptDelta
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.transcription.transcriber import Transcriber
from asr_server.transport.messages import Submit
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.tokens import TOKENIZER, words

ENGLISH = DecodingOptions(language="en", token_logprobs=True)
THREE_CHUNKS = wav(noise(75))


def number_of_the_chunk(submit: Submit) -> ChunkResult:
    return say(*words(str(submit.id.chunk)))


class RunningApp:
    """A transcriber between a real pool and a replica."""

    def __init__(self, credit: int = 100, workers: int = 2) -> None:
        self.answer: Callable[[Submit], ChunkResult | Exception] = number_of_the_chunk
        self.replica = FakeReplica(lambda submit: self.answer(submit), credit)
        self.dispatcher = Dispatcher(embedded(), lambda _: self.replica)
        self.pool = PreprocessPool(workers)
        self.transcriber = Transcriber(self.dispatcher, self.pool, TOKENIZER)

    async def transcribe(
        self, source: bytes, options: DecodingOptions = ENGLISH, speakers: tuple[str, ...] = ()
    ) -> tuple[list[TranscriptDelta], Transcript]:
        recording = Recording(MemoryFile(source), split_channels=bool(speakers))
        async with self.transcriber.run(recording, options, speakers) as transcription:
            deltas = [delta async for delta in transcription]
            return deltas, await transcription.transcript()


def two_channels(*spans: tuple[int, int, int]) -> bytes:
    """75 s of silence, but for noise from a second to another in a channel."""
    samples = np.zeros((75 * 16_000, 2), np.float32)
    for channel, start_s, end_s in spans:
        sound = noise(end_s - start_s)
        samples[start_s * 16_000 : end_s * 16_000, channel] = -sound[::-1] if channel else sound
    return wav(samples)
