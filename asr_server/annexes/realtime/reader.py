"""Read one turn while it grows: whole chunks as they fill, the growing one now and then, and who speaks.

Embeddings live as long as the session and are never written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime import turn_types as turns
from asr_server.annexes.realtime.turn_types import Event, TurnRead
from asr_server.annexes.speakers.labels import UNKNOWN, BytesOf, Turn, label_segments
from asr_server.annexes.speakers.track import Person, SpeakerTrack
from asr_server.api.errors import body_of
from asr_server.api.models import ServedModel
from asr_server.audio.split import Splitter
from asr_server.core import (
    SAMPLE_RATE,
    Chunk,
    DecodingOptions,
    Samples,
    Segment,
    TokenLogprob,
    TranscriptDelta,
    Word,
)

NEW_PERSON_S: Final = 1.5  # of clean speech: a shorter new voice is the nearest known person
LIKE_SHORT: Final = 0.35  # cosine from which a voice is a person of whom less than that is known
MOST_S: Final = 60.0  # that a known voice counts, so that it follows its speaker


class SessionSpeakers:
    def __init__(self) -> None:
        self._people: dict[str, Person] = {}
        self._last = UNKNOWN
        self._newest: TurnSpeakers | None = None

    def new_turn(self) -> TurnSpeakers:
        self._newest = TurnSpeakers(self, self._newest.is_over if self._newest else None)
        return self._newest

    async def label(
        self, track: SpeakerTrack, segments: Sequence[Segment], bytes_of: BytesOf
    ) -> list[Segment]:
        turns, people = await track.spoken(self._people)
        names = {name: self._name(name, person) for name, person in people.items()}
        for name, person in people.items():
            self._remember(names[name], person)
        named = [turn._replace(speaker=names[turn.speaker]) for turn in turns]
        labelled = label_segments(segments, named or [Turn(0.0, math.inf, self._last)], bytes_of)
        if labelled:
            self._last = labelled[-1].speaker or UNKNOWN
        return labelled

    def _name(self, name: str, person: Person) -> str:
        if name in self._people or not self._people:
            return name
        likeness = {known: float(own.embedding @ person.embedding) for known, own in self._people.items()}
        nearest = max(likeness, key=likeness.__getitem__)
        if person.clean_s < NEW_PERSON_S:
            return nearest if person.embedding.any() else self._last
        is_little_known = self._people[nearest].clean_s < NEW_PERSON_S
        return nearest if is_little_known and likeness[nearest] >= LIKE_SHORT else name

    def _remember(self, name: str, person: Person) -> None:
        if not person.embedding.any():
            return
        before = self._people.get(name, Person(np.zeros_like(person.embedding), 0.0))
        mean = before.embedding * before.clean_s + person.embedding * person.clean_s
        total_s = min(before.clean_s + person.clean_s, MOST_S)
        length = max(float(np.linalg.norm(mean)), 1e-9)
        self._people[name] = Person(np.asarray(mean / length, np.float32), total_s)


class TurnSpeakers(SpeakerTrack):
    """Follow the speakers of one turn. Turns are labelled in their order, so that letters are too."""

    def __init__(self, session: SessionSpeakers, is_over_before: asyncio.Event | None) -> None:
        super().__init__()
        self.is_over = asyncio.Event()
        self._session = session
        self._is_over_before = is_over_before

    async def label_turn(self, segments: Sequence[Segment], bytes_of: BytesOf) -> list[Segment]:
        if self._is_over_before:
            await self._is_over_before.wait()
        return await self._session.label(self, segments, bytes_of)

    def close(self) -> None:
        super().close()
        self.is_over.set()


MIN_REST: Final = SAMPLE_RATE  # samples behind a cut: to wait for more would hold back what is said

Outcome = TranscriptDelta | Exception
Read = tuple[str, str | None, tuple[TokenLogprob, ...] | None, tuple[Word, ...]]  # what events tell of a text


@dataclass(eq=False)
class TurnReader:
    """Read a turn and report its texts as events; dropped readings report none."""

    item_id: str
    model: ServedModel
    options: DecodingOptions
    report: Callable[[Event], None]
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    speakers: TurnSpeakers | None = None
    shows_interim: bool = False

    def __post_init__(self) -> None:
        self._splitter = Splitter(self.model.audio_limits.chunk_samples, MIN_REST)
        self._chunks: asyncio.Queue[asyncio.Task[Outcome] | None] = asyncio.Queue()
        self._num_chunks = 0
        self.unread: set[asyncio.Task[Outcome]] = set()  # chunks that are being read
        self._interim: asyncio.Task[Any] | None = None
        self._draft: tuple[int, ...] = ()  # the newest interim reading of the growing chunk
        self._ahead: list[asyncio.Task[Outcome]] | None = None
        self._reporting = self.spawn(self._report_in_order())

    @property
    def duration_s(self) -> float:
        return self._splitter.num_samples / SAMPLE_RATE

    def push(self, samples: Samples) -> None:
        if self.speakers:
            self.speakers.push(samples)
        for chunk in self._splitter.push(samples):
            self.discard_ahead()
            self._cancel_interim()
            self._add(self._read(chunk, urgency=0))
            self._draft = ()

    def set_options(self, options: DecodingOptions) -> None:
        """Read the rest by these options. Log-probabilities stay as the turn began."""
        if options == self.options:
            return
        if self._num_chunks:
            options = msgspec.structs.replace(options, token_logprobs=self.options.token_logprobs)
        self.options = options
        if self._ahead is not None:
            self.read_ahead()

    def read_interim(self) -> None:
        if self._interim:  # the turn paused and went on: one that was cancelled is yet to be heard of
            self.report(turns.InterimRead(self.item_id))
            return
        self._interim = self.spawn(self._read_interim())

    def read_ahead(self) -> None:
        self._cancel_interim()
        self.discard_ahead()
        self._ahead = [self._read(chunk) for chunk in self._splitter.peek()]
        if len(self._ahead) == 1:
            where = self._num_chunks, self._splitter.num_samples
            self._ahead[0].add_done_callback(partial(self._on_ahead_read, *where))

    def _on_ahead_read(self, index: int, num_samples: int, task: asyncio.Task[Outcome]) -> None:
        if self._interim is task:
            self._interim = None
        if not task.cancelled():
            self._show(index, num_samples, task.result())

    def go_on(self, is_shown: bool) -> None:
        """Take what is read ahead for an interim reading, or end it: the speaker has only paused."""
        if is_shown and self._ahead and len(self._ahead) == 1 and not self._ahead[0].done():
            (self._interim,), self._ahead = self._ahead, None
        else:
            self.discard_ahead()

    def discard_ahead(self) -> None:
        for task in self._ahead or []:
            task.cancel()
        self._ahead = None

    def finish(self) -> None:
        self._cancel_interim()
        if self._ahead is None:
            self._ahead = [self._read(chunk) for chunk in self._splitter.finish()]
        for task in self._ahead:
            self._add(task)
        self._chunks.put_nowait(None)

    def cancel(self) -> None:
        self._cancel_interim()
        for task in (*self.unread, self._reporting):
            task.cancel()
        self._close_speakers()

    def _close_speakers(self) -> None:
        if self.speakers:
            self.speakers.close()

    def _read(self, chunk: Chunk, urgency: int = 1) -> asyncio.Task[Outcome]:
        options = msgspec.structs.replace(self.options, draft_tokens=self._draft, urgency=urgency)
        task = self.spawn(_attempt(self.model, chunk, options, self.speakers))
        self.unread.add(task)
        task.add_done_callback(self.unread.discard)
        return task

    def _add(self, task: asyncio.Task[Outcome]) -> None:
        self._num_chunks += 1
        self._chunks.put_nowait(task)

    async def _read_interim(self) -> None:
        async with self.model.reading_interim():
            where, chunks = (self._num_chunks, self._splitter.num_samples), self._splitter.peek()
            if len(chunks) == 1:
                options = msgspec.structs.replace(
                    self.options,
                    word_timestamps=self.shows_interim,
                    text_only=not self.shows_interim,
                    draft_tokens=self._draft,
                    urgency=-1,
                )
                self._show(*where, await _attempt(self.model, chunks[0], options))
            else:
                self.report(turns.InterimRead(self.item_id))
        self._interim = None

    def _show(self, index: int, num_samples: int, outcome: Outcome) -> None:
        if isinstance(outcome, Exception) or index != self._num_chunks:
            self.report(turns.InterimRead(self.item_id))
            return
        self._draft = tuple(token for segment in outcome.segments for token in segment.tokens)
        self.report(turns.InterimRead(self.item_id, index, *self._read_of(outcome), num_samples))

    def _cancel_interim(self) -> None:
        if self._interim:
            self._interim.cancel()
            self._interim = None
            self.report(turns.InterimRead(self.item_id))

    async def _report_in_order(self) -> None:
        deltas: list[TranscriptDelta] = []
        error: Exception | None = None
        while task := await self._chunks.get():
            outcome = await task
            if isinstance(outcome, Exception):
                error = error or outcome
            elif error is None:
                deltas.append(outcome)
                end = round(outcome.end_s * SAMPLE_RATE)
                self.report(turns.ChunkRead(self.item_id, *self._read_of(outcome), end))
        segments: tuple[Segment, ...] = ()
        if error is None:
            try:
                segments = await self._labelled(deltas)
            except Exception as failure:
                error = failure
        self._close_speakers()
        if error:
            self.report(turns.TurnFailed(self.item_id, out.ItemError(**dict(body_of(error).error))))
        else:
            self.report(self._read_whole(deltas, segments))

    async def _labelled(self, deltas: list[TranscriptDelta]) -> tuple[Segment, ...]:
        segments = [segment for delta in deltas for segment in delta.segments]
        if not self.speakers or not segments:
            return ()
        bytes_of = self.model.transcriber.tokenizer.decode_bytes
        labelled = await self.speakers.label_turn(segments, bytes_of)
        return tuple(each for each in labelled if each.text.strip())

    def _read_of(self, delta: TranscriptDelta) -> Read:
        words = (word for segment in delta.segments for word in segment.words)
        logprobs = delta.logprobs if self.options.token_logprobs else None
        return delta.text, delta.language, logprobs, tuple(words) if self.shows_interim else ()

    def _read_whole(self, deltas: list[TranscriptDelta], segments: tuple[Segment, ...]) -> TurnRead:
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs)
        languages = dict.fromkeys(delta.language for delta in deltas if delta.text and delta.language)
        return TurnRead(
            self.item_id,
            self.duration_s,
            tuple(languages),
            logprobs if self.options.token_logprobs else None,
            segments,
        )


async def _attempt(
    model: ServedModel, chunk: Chunk, options: DecodingOptions, speakers: TurnSpeakers | None = None
) -> Outcome:
    """Read a chunk, and wait until its speakers are nearly known: they bound the backlog too."""
    try:
        async with model.using():
            delta = await model.transcriber.transcribe_chunk(chunk, options)
        if speakers:
            await speakers.wait_for_room()
        return delta
    except Exception as error:
        return error
