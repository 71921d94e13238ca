"""Join a request's text, chunk by chunk in file order. Split channels are ordered by start."""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asr_server.audio.recording import ChunkSource, Recording
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import (
    POSITIONS_PER_S,
    Chunk,
    DecodingOptions,
    DroppedSegment,
    Segment,
    TokenLogprob,
    Transcript,
    TranscriptDelta,
)
from asr_server.language_codes import ENGLISH, continuation, name_of
from asr_server.transcription.language import LanguageDetector
from asr_server.transcription.segments import DecodedPart, segments_of, token_logprobs

logger = logging.getLogger(__name__)


def _num_positions(duration_s: float) -> int:
    return math.ceil(round(duration_s, 6) * POSITIONS_PER_S)


@dataclass(eq=False)
class TranscriptBuilder:
    tokenizer: Tokenizer
    source: Recording | ChunkSource
    options: DecodingOptions
    language: LanguageDetector
    speakers: Sequence[str]  # of split channels

    def __post_init__(self) -> None:
        # With their languages, until all that begin before are there: a window or two of a channel.
        self._held: list[tuple[Segment, str | None]] = []
        self._letters = Counter[str]()  # of the text so far, by language
        self._dropped: list[DroppedSegment] = []
        self._settled_s = 0.0 if self.speakers else math.inf
        self._deltas: list[TranscriptDelta] = []
        self._text = ""
        self._num_segments = 0

    def settle(self, until_s: float) -> TranscriptDelta:
        self._settled_s = until_s
        return self.delta([])

    def drop_copy(self, chunk: Chunk) -> None:
        end_s = chunk.start_s + chunk.duration_s
        self._dropped.append(DroppedSegment(chunk.start_s, end_s, "", "same_channel"))

    def keep(self, delta: TranscriptDelta) -> None:
        self._deltas.append(delta)

    def delta(self, parts: list[DecodedPart]) -> TranscriptDelta:
        self._dropped += [dropped for part in parts for dropped in part.dropped]
        so_far, letters = self._text, Counter[str]()
        segments: list[Segment] = []
        for segment, language in self._next_segments(parts):
            segments.append(segment)
            self._text += continuation(self._text, segment.text, language)
            if language is not None:
                letters[language] += len(segment.text)
        self._letters += letters
        self._num_segments += len(segments)
        read_s = max((part.start_s + part.duration_s - parts[0].start_s for part in parts), default=0.0)
        return TranscriptDelta(
            text=self._text[len(so_far) :],
            segments=tuple(segments),
            logprobs=self._logprobs(parts),
            language=_most(letters) or self._language_of(parts),
            num_audio_tokens=_num_positions(read_s),
            num_text_tokens=sum(part.num_read for part in parts),
            end_s=min(self._settled_s, parts[0].start_s + read_s if parts else self.source.duration_s),
        )

    def early_delta(self, parts: list[DecodedPart]) -> TranscriptDelta:
        """Return the final text of a chunk under way; its segments come at the end."""
        text, start_s = self._text, parts[0].start_s
        read_until_s = start_s
        for part in parts:
            language = self._language_of([part])
            for segment in segments_of(part, self.tokenizer):
                text += continuation(text, segment.text, language)
                read_until_s = min(segment.end_s, part.start_s + part.duration_s)
        return TranscriptDelta(
            text=text[len(self._text) :],
            segments=(),
            logprobs=self._logprobs(parts),
            language=self._language_of(parts),
            num_audio_tokens=_num_positions(read_until_s - start_s),
            num_text_tokens=sum(part.num_read for part in parts),
            end_s=parts[-1].start_s,
        )

    def _logprobs(self, parts: list[DecodedPart]) -> tuple[TokenLogprob, ...]:
        if not self.options.token_logprobs:
            return ()
        return tuple(entry for part in parts for entry in token_logprobs(part, self.tokenizer))

    def _next_segments(self, parts: list[DecodedPart]) -> list[tuple[Segment, str | None]]:
        for part in parts:
            language = self._language_of([part])
            speaker = self.speakers[part.channel] if self.speakers else None
            self._held += [(each, language) for each in segments_of(part, self.tokenizer, speaker)]
        if self.speakers:
            self._held.sort(key=lambda held: held[0].start_s)
        num_final = sum(segment.start_s < self._settled_s for segment, _ in self._held)
        final, self._held = self._held[:num_final], self._held[num_final:]
        return [
            (msgspec.structs.replace(segment, id=segment_id), language)
            for segment_id, (segment, language) in enumerate(final, self._num_segments)
        ]

    def transcript(self) -> Transcript:
        if self.source.truncated:
            logger.warning("the recording ends early: transcribed the %.1f s read", self.source.duration_s)
        deltas = self._deltas
        main_language = _most(self._letters) if self.language.is_per_chunk else self.language.code
        spoken = ENGLISH if self.options.task == "translate" else main_language
        return Transcript(
            text=self._text,
            segments=tuple(segment for delta in deltas for segment in delta.segments),
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            language=name_of(spoken),
            duration_s=self.source.duration_s,
            num_audio_tokens=sum(delta.num_audio_tokens for delta in deltas),
            num_text_tokens=sum(delta.num_text_tokens for delta in deltas),
            task=self.options.task,
            languages=tuple(self._letters),
            is_cut_short=self.source.truncated,
            tracks=self.source.tracks_read,
            dropped=tuple(self._dropped),
            language_probability=self.language.probability,
        )

    def _language_of(self, parts: Sequence[DecodedPart]) -> str | None:
        return self.language.language_of(parts[0].result.language if parts else None)


def _most(letters: Counter[str]) -> str | None:
    return max(letters, key=letters.__getitem__, default=None)
