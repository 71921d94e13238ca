"""Take requests from audio to text over the shared preprocess pool and dispatcher.

Runs on the event loop and computes nothing there. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import ChunkSource, DecodeSlice, Recording
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import (
    TEMPERATURE_LADDER,
    Chunk,
    DecodingOptions,
    TranscriptDelta,
    temperatures_for,
)
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import RequestHandle
from asr_server.telemetry import unique_request_id
from asr_server.transcription.channels import ClearChannels, SplitChannels
from asr_server.transcription.language import Languages
from asr_server.transcription.language_detector import MAX_VOTES, LanguageDetector
from asr_server.transcription.prompt import boosted_keywords, prompt_tokens
from asr_server.transcription.reading import ChunkReader
from asr_server.transcription.session import Labeller, NextSlice, TranscriptionSession
from asr_server.transcription.stall_watch import StallLimits, StallWatch
from asr_server.transcription.tasks import task_group
from asr_server.transcription.transcript import TranscriptBuilder


class Transcriber:
    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: PreprocessPool,
        tokenizer: Tokenizer,
        check_voice: bool = True,
        stall_limits: StallLimits | None = None,
        temperatures: tuple[float, ...] = TEMPERATURE_LADDER,
    ) -> None:
        specials = tokenizer.specials
        self.tokenizer = tokenizer
        self.languages = Languages(specials.languages if specials.is_multilingual else ())
        self.can_translate = self.languages.only is None and specials.translate is not None
        self.pool = pool
        self.check_voice = check_voice
        self._dispatcher = dispatcher
        self._temperatures = temperatures
        self._stall_limits = stall_limits or StallLimits()

    def options(
        self,
        *,
        language: str | None = None,
        languages: Sequence[str] = (),
        params: tuple[str, str] = ("language", "languages[]"),
        multilingual: bool = False,
        prompt: str = "",
        keywords: Iterable[str] = (),
        temperature: float = 0.0,
        **own: Any,
    ) -> DecodingOptions:
        """Make the options of a request, live turn or file from what its client asks for.

        Args:
            languages: candidates; several mean a recording in several languages.
            params: the client's field names for `language` and `languages`.
            own: fields of `DecodingOptions`.

        Raises InvalidValue for an unknown language.
        """
        code, candidates = self.languages.choice(language, languages, params)
        return DecodingOptions(
            language=code,
            candidate_languages=candidates,
            multilingual=multilingual or len(candidates) > 1,
            prompt_tokens=prompt_tokens(self.tokenizer, prompt),
            keywords=boosted_keywords(list(keywords)),
            temperatures=temperatures_for(temperature, self._temperatures),
            early_results=True,
            **own,
        )

    @asynccontextmanager
    async def run(
        self,
        recording: Recording,
        options: DecodingOptions,
        speakers: Sequence[str] = (),
        labeller: Labeller | None = None,
    ) -> AsyncIterator[TranscriptionSession]:
        """Run a request while the block runs; leaving it cancels the rest and closes the recording.

        Args:
            speakers: speakers of split channels, which exclude a labeller; else empty.
            labeller: listens to the recording, which waits for it; labels the transcript; is closed.

        Raises, also inside the block: RequestError, EngineUnavailable, ChunkFailed.
        """

        async def next_slice(room: int) -> DecodeSlice:
            if labeller is not None:
                await labeller.wait_for_room()
            return await self.pool.decode_slice(recording, room)

        if labeller is not None:
            recording.listener = labeller.push
        try:
            async with self._run(recording, next_slice, options, speakers, labeller) as session:
                yield session
        finally:
            if labeller is not None:
                labeller.close()

    async def transcribe_chunk(self, chunk: Chunk, options: DecodingOptions) -> TranscriptDelta:
        """Transcribe one chunk of live speech. Cancelled, it frees its slot.

        Raises: EngineUnavailable, ChunkFailed.
        """
        source = ChunkSource(chunk)
        async with self._run(source, source.next_slice, options, is_live=True) as session:
            return await session.only_delta()

    @asynccontextmanager
    async def _run(
        self,
        source: Recording | ChunkSource,
        next_slice: NextSlice,
        options: DecodingOptions,
        speakers: Sequence[str] = (),
        labeller: Labeller | None = None,
        is_live: bool = False,
    ) -> AsyncIterator[TranscriptionSession]:
        handle = self._dispatcher.open(unique_request_id(), is_live)
        session = self._session(handle, source, next_slice, options, speakers, labeller)
        try:
            async with task_group() as group:
                session.start(group)
                try:
                    yield session
                finally:
                    session.stop()
        finally:
            session.close()

    def _session(
        self,
        handle: RequestHandle,
        source: Recording | ChunkSource,
        next_slice: NextSlice,
        options: DecodingOptions,
        speakers: Sequence[str],
        labeller: Labeller | None,
    ) -> TranscriptionSession:
        # Segments leave before their chunk is decoded, but where those of several channels wait for their
        # order, or where a limit on tokens has all text kept, because no unread tail is read again.
        if speakers or options.max_new_tokens is not None:
            options = msgspec.structs.replace(options, early_results=False)
        language = LanguageDetector(
            options.language or self.languages.only,
            options.candidate_languages,
            # The text of one chunk is the prompt of the next: none can wait for a later one's vote.
            max_votes=1 if options.condition_on_previous_text else MAX_VOTES,
            per_chunk=options.multilingual,
        )
        voice_pool = self.pool if self.check_voice else None
        channels = SplitChannels(source) if speakers else ClearChannels(source)
        watch = StallWatch(handle, self.pool, self._stall_limits)
        reader = ChunkReader(handle, self.tokenizer, options, language, voice_pool, watch, channels)
        builder = TranscriptBuilder(self.tokenizer, source, options, language, speakers)
        return TranscriptionSession(
            handle, source, next_slice, options, language, reader, builder, watch, bool(speakers), labeller
        )
