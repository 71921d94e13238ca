"""Read stretches of a recording once more, each with the text that may be said there.

The decoder is given the text, between words that are known to be said: it says when each word was said and
how likely that is.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from asr_server.annexes.alignment.matching import letters_in
from asr_server.audio.recording import Recording
from asr_server.core import SAMPLE_RATE, Chunk, Clip, Samples, Word
from asr_server.dispatch.queue import RequestHandle
from asr_server.levels import joined
from asr_server.telemetry import new_handle_id
from asr_server.transcription.progress import StallWatch
from asr_server.transcription.segments import decode_part
from asr_server.transcription.transcriber import Transcriber, task_group
from asr_server.transcription.word_times import edges_by_letters

# A stretch is read with so many of the known words around it, at most so far away, and with some sound around
# these, as edges of words are not exact.
CONTEXT_WORDS: Final = 4
CONTEXT_S: Final = 3.0
MARGIN_S: Final = 0.1
MAX_READ_S: Final = 30.0  # Whisper's window
MAX_TOKENS: Final = 440  # of the decoder's 448 positions
# Nobody says more: 40 letters a second of sound, between two edges that may be off by so much together.
MAX_LETTERS_PER_S: Final = 40.0
EDGES_OFF_S: Final = 0.2

OpenRecording = Callable[[Sequence[Clip]], Recording]


class Stretch(NamedTuple):
    """Words of the text without times, and the sound between the known words around them."""

    first: int
    end: int
    start_s: float
    end_s: float


class _Reading(NamedTuple):
    stretch: Stretch
    words: Sequence[str]  # with the known ones around
    own: slice  # those of the stretch among them
    start: int  # samples
    end: int
    tokens: tuple[int, ...]

    @property
    def fits(self) -> bool:
        is_short = self.end - self.start <= MAX_READ_S * SAMPLE_RATE and len(self.tokens) <= MAX_TOKENS
        return is_short and self.has_room(self.stretch.end_s - self.stretch.start_s)

    def has_room(self, sound_s: float) -> bool:
        count = sum(len("".join(letters_in(word))) for word in self.words[self.own])
        return count <= MAX_LETTERS_PER_S * (sound_s + EDGES_OFF_S)


Said = tuple[Stretch, list[Word]]


@dataclass(frozen=True)
class StretchReader:
    transcriber: Transcriber
    open_recording: OpenRecording
    language: str | None
    is_spaced: bool
    words: Sequence[str]  # of the text
    timed: Sequence[Word | None]  # where their times are known
    duration_s: float

    def _reading(self, stretch: Stretch) -> _Reading:
        timed = self.timed
        before = _known(reversed(timed[max(0, stretch.first - CONTEXT_WORDS) : stretch.first]), stretch)
        behind = _known(timed[stretch.end : stretch.end + CONTEXT_WORDS], stretch)
        start_s = before[-1].start_s if before else stretch.start_s
        end_s = behind[-1].end_s if behind else stretch.end_s
        start = round(max(0.0, start_s - MARGIN_S) * SAMPLE_RATE)
        end = round(min(self.duration_s, end_s + MARGIN_S) * SAMPLE_RATE)
        own = self.words[stretch.first - len(before) : stretch.end + len(behind)]
        text = " " + " ".join(own) if self.is_spaced else "".join(own)
        tokens = tuple(self.transcriber.tokenizer.encode(text))
        return _Reading(stretch, own, slice(len(before), len(own) - len(behind)), start, end, tokens)

    async def read(self, stretches: Sequence[Stretch]) -> list[Said]:
        """Return the words of each stretch that fits into a window, with times in the file.

        Raises what reading a recording raises.
        """
        readings = [each for each in map(self._reading, stretches) if each.fits]
        if not readings:
            return []
        transcriber, cutter = self.transcriber, _Cutter(readings)
        clips = joined([(each.start / SAMPLE_RATE, each.end / SAMPLE_RATE) for each in readings])
        recording = self.open_recording([Clip(*clip) for clip in clips])
        recording.listener = cutter.push
        handle = transcriber.dispatcher.open(new_handle_id())
        watch, this = StallWatch(handle, transcriber.pool, transcriber.stall_limits), asyncio.current_task()
        assert this is not None
        reading: list[asyncio.Task[Said | None]] = []
        try:
            async with task_group() as group:
                watching = group.create_task(watch.run([this]))
                finished = False
                while not finished:
                    room = await handle.wait_for_capacity()
                    with watch.waiting_for_pool():
                        _, finished = await transcriber.pool.decode_slice(recording, room)
                    if finished:
                        cutter.push(np.empty(0, np.float32), is_last=True)
                    while cutter.ready:
                        await handle.wait_for_capacity()
                        each, samples = cutter.ready.popleft()
                        chunk = Chunk(len(reading), each.start, samples)
                        reading.append(group.create_task(self._said(each, chunk, handle)))
                        await asyncio.sleep(0)  # it is in the queue by then, and counted
                said = [await each for each in reading]
                watching.cancel()
                return [each for each in said if each is not None]
        finally:
            handle.cancel()
            recording.close()

    async def _said(self, reading: _Reading, chunk: Chunk, handle: RequestHandle) -> Said | None:
        """Return None where the sound is too short for the words: the rest of the stretch is silent."""
        options = self.transcriber.options(
            language=self.language, word_timestamps=True, given_tokens=reading.tokens
        )
        result = await handle.submit(chunk, options)
        if not reading.has_room(_sound_s(reading.stretch, result.pauses_s, chunk.start_s)):
            return None
        part = decode_part(chunk, result, options, self.transcriber.tokenizer)
        heard = [word for span in part.spans for word in span.words]
        words = list(_regrouped(reading.words, heard, chunk.start_s))
        return reading.stretch, [_within(word, reading.stretch) for word in words[reading.own]]


def _known(beside: Iterable[Word | None], stretch: Stretch) -> list[Word]:
    """Return the known words beside a stretch, the nearest one first."""
    known: list[Word] = []
    for word in beside:
        if word is None or max(stretch.start_s - word.start_s, word.end_s - stretch.end_s) > CONTEXT_S:
            break
        known.append(word)
    return known


def _sound_s(stretch: Stretch, pauses_s: Sequence[tuple[float, float]], offset_s: float) -> float:
    silent_s = (
        min(end_s + offset_s, stretch.end_s) - max(start_s + offset_s, stretch.start_s)
        for start_s, end_s in pauses_s
    )
    return stretch.end_s - stretch.start_s - sum(each for each in silent_s if each > 0)


def _regrouped(texts: Sequence[str], words: Sequence[Word], offset_s: float) -> Iterator[Word]:
    """Give the texts the times of their characters, as the tokenizer's words have them."""
    characters = [
        msgspec.structs.replace(word, start_s=offset_s + start_s, end_s=offset_s + end_s)
        for word in words
        for start_s, end_s in edges_by_letters("".join(word.text.split()), word.start_s, word.end_s)
    ]
    at = 0
    for text in texts:
        own = characters[at : at + len("".join(text.split()))]
        at += len(own)
        least = min(own, key=lambda each: each.probability or 0.0)
        yield msgspec.structs.replace(least, text=text, start_s=own[0].start_s, end_s=own[-1].end_s)


def _within(word: Word, stretch: Stretch) -> Word:
    start_s = min(max(word.start_s, stretch.start_s), stretch.end_s)
    return msgspec.structs.replace(word, start_s=start_s, end_s=max(start_s, min(word.end_s, stretch.end_s)))


class _Cutter:
    """Cut readings out of a recording's samples, as they are decoded."""

    def __init__(self, readings: Sequence[_Reading]) -> None:
        self.ready: deque[tuple[_Reading, Samples]] = deque()
        self._todo = deque(readings)
        self._kept: Samples = np.empty(0, np.float32)  # from the first sample that a reading needs yet
        self._first = 0

    def push(self, samples: Samples, is_last: bool = False) -> None:
        self._kept = np.concatenate([self._kept, samples])
        end = self._first + len(self._kept)
        while self._todo and (is_last or self._todo[0].end <= end):  # rounding may reach beyond the last
            reading = self._todo.popleft()
            own = self._kept[reading.start - self._first : reading.end - self._first]
            if len(own):
                self.ready.append((reading, own.copy()))
        first = min(self._todo[0].start, end) if self._todo else end
        self._kept, self._first = self._kept[first - self._first :], first
