"""Read many sounds as the server does: what a condition, a length or keywords change in the text."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import soundfile

from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Word

AT_ONCE = 8
Advance = Callable[[], None]


class Sound(NamedTuple):
    samples: npt.NDArray[np.float32]  # [T] or [T, channels]
    language: str | None = "en"  # None: detected
    options: Mapping[str, Any] = MappingProxyType({})  # of DecodingOptions, in place of the server's


class Read(NamedTuple):
    """One segment of a transcript."""

    text: str
    start_s: float
    words: Sequence[Word]


class Reading(NamedTuple):
    text: str
    segments: list[Read]
    dropped: tuple[str, ...] = ()  # by the server's own checks


async def read_all(
    settings: Settings,
    sounds: Sequence[Sound],
    with_words: bool = False,
    advance: Advance = lambda: None,
    on_begin: Callable[[int], object] = lambda number: None,
) -> list[Reading]:
    """Read the sounds, several at once, each in a task of its own."""
    transcriber = LocalTranscriber(settings, TranscribeJob((), word_timestamps=with_words))
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, sound: Sound) -> Reading:
        on_begin(number)
        own = transcriber.options_for(sound.language, None)
        own = msgspec.structs.replace(own, **sound.options)
        async with places:
            with tempfile.TemporaryFile() as file:
                soundfile.write(file, sound.samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
                file.seek(0)
                transcript = await transcriber.transcribe(file, lambda *_: None, own)
        advance()
        segments = [Read(each.text, each.start_s, each.words) for each in transcript.segments]
        return Reading(transcript.text, segments, tuple(each.text for each in transcript.dropped))

    async with transcriber.running():
        return await asyncio.gather(*(one(*each) for each in enumerate(sounds)))
