"""Check segments with a voice detector: drop invented ones.

Whisper judges silence for a whole chunk, so a bark between words may become "five". A doubtful segment
stays only if the detector finds speech in its time, or is dropped; all behind it are in doubt too. Parts
beyond doubt, nearly all real speech, cost nothing.

Times may be seconds too early. If somebody speaks behind a dropped segment, the audio is read again from
there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.voice import (
    certain_speech_s,
    holds_speech,
    next_speech_s,
    possible_and_certain_speech_s,
)
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, Samples
from asr_server.levels import Stretch, joined
from asr_server.transcription.segments import FRAMES_PER_S, DecodedPart, Span, ending_at, rest_of
from asr_server.transcription.words import num_letters

DOUBTFUL_LOGPROB: Final = -0.6
DOUBTFUL_NO_SPEECH: Final = 0.2
SURE_LOGPROB: Final = -0.4  # what is invented for music is often one probable short sentence
FULL_LETTERS_PER_S: Final = 5.0  # a reader says 11 to 17: text of less has lost the times of its words
LEAD_S: Final = 0.3  # before speech that was passed over
MIN_ADVANCE_S: Final = 0.5  # from a chunk's start to where it is read again: the same audio has the same text
SURELY_S: Final = 0.5  # of certain speech: Whisper's own judgement counts no more
SAMPLES_PER_FRAME: Final = SAMPLE_RATE // FRAMES_PER_S  # so that a segment's `seek` is exact
# On both sides of a segment: what its times may be off. A faint beginning or a last consonant is no voice to
# the detector.
MARGIN_S: Final = 0.2
MIN_SILENCE_S: Final = 0.4  # that parts words
NO_SPEECH_S: Final = 3.0  # of sound in which nobody may be speaking, at least: it is not given to the model,
KEPT_S: Final = 1.0  # but for this much beside speech
LOUD: Final = 0.5  # of the level of the pieces: what lies between them may hide speech


class SpokenChunk(msgspec.Struct, frozen=True):
    """A chunk's pieces with possible speech, and its certain speech, on the file's clock."""

    pieces: Sequence[Chunk]
    possible_s: Sequence[Stretch] = ()
    certain_s: Sequence[Stretch] = ()
    whole: Chunk | None = None  # where the pieces leave out much sound

    def since(self, start_s: float) -> SpokenChunk:
        """Return the stretches on a clock that begins at `start_s`."""
        possible_s, certain_s = (
            [(first_s - start_s, last_s - start_s) for first_s, last_s in stretches_s]
            for stretches_s in (self.possible_s, self.certain_s)
        )
        return SpokenChunk(self.pieces, possible_s, certain_s)

    @property
    def uncut(self) -> SpokenChunk | None:
        return None if self.whole is None else SpokenChunk([self.whole], (), self.certain_s)

    def certain_within(self, start_s: float, end_s: float) -> list[Stretch]:
        clipped = [(max(start_s, first_s), min(end_s, last_s)) for first_s, last_s in self.certain_s]
        return [(first_s, last_s) for first_s, last_s in clipped if first_s < last_s]

    def certainly_spoken_s(self, start_s: float, end_s: float) -> float:
        return sum(last_s - first_s for first_s, last_s in self.certain_within(start_s, end_s))


async def listen(chunk: Chunk, pool: PreprocessPool) -> SpokenChunk:
    """Cut the chunk at long stretches without speech: beside noise, models miss or mistime words.

    A chunk without any speech stays whole.
    """
    if chunk.duration_s < NO_SPEECH_S:
        return SpokenChunk([chunk])
    spoken = await _listened(chunk, pool)
    possible_s = spoken.since(chunk.start_s).possible_s
    pieces_s = _pieces_s(possible_s, chunk.duration_s) if possible_s else []
    if not pieces_s or pieces_s == [(0.0, chunk.duration_s)]:
        return spoken
    pieces = [_between(chunk, start_s, end_s) for start_s, end_s in pieces_s]
    is_loud = await pool.run(_is_loud_between, pieces, chunk)
    return msgspec.structs.replace(spoken, pieces=pieces, whole=chunk if is_loud else None)


def _is_loud_between(pieces: Sequence[Chunk], chunk: Chunk) -> bool:
    is_left_out = np.ones(len(chunk.samples), bool)
    for piece in pieces:
        first = piece.start_sample - chunk.start_sample
        is_left_out[first : first + len(piece.samples)] = False
    return bool(np.std(chunk.samples[is_left_out]) >= LOUD * np.std(chunk.samples[~is_left_out]))


async def _listened(chunk: Chunk, pool: PreprocessPool) -> SpokenChunk:
    possible_s, certain_s = await pool.run(possible_and_certain_speech_s, chunk.samples)
    return SpokenChunk([chunk], _in_file(possible_s, chunk), _in_file(certain_s, chunk))


def with_silences(result: ChunkResult, chunk: Chunk, spoken: SpokenChunk) -> ChunkResult:
    """Add the stretches in which nobody may speak to the pauses that part words, as loudness finds them."""
    if not result.token_times_s or not spoken.possible_s:
        return result
    edges_s = [-math.inf, *chain(*spoken.possible_s), math.inf]
    silences_s = [
        (
            max(0.0, start_s + MARGIN_S - chunk.start_s),
            min(chunk.duration_s, end_s - MARGIN_S - chunk.start_s),
        )
        for start_s, end_s in zip(edges_s[::2], edges_s[1::2], strict=True)
    ]
    silences_s = [(start_s, end_s) for start_s, end_s in silences_s if end_s - start_s >= MIN_SILENCE_S]
    return msgspec.structs.replace(result, pauses_s=tuple(joined([*result.pauses_s, *silences_s])))


def _in_file(stretches_s: Sequence[Stretch], chunk: Chunk) -> list[Stretch]:
    return [(chunk.start_s + start_s, chunk.start_s + end_s) for start_s, end_s in stretches_s]


def _pieces_s(speech_s: Sequence[Stretch], duration_s: float) -> list[Stretch]:
    edges_s = [0.0]
    spoken_to_s = 0.0
    for start_s, end_s in [*speech_s, (duration_s, duration_s)]:
        if start_s - spoken_to_s >= NO_SPEECH_S:
            edges_s += [spoken_to_s + KEPT_S, start_s - KEPT_S]
        spoken_to_s = end_s
    if speech_s[0][0] >= NO_SPEECH_S:
        del edges_s[:2]
    if duration_s - speech_s[-1][1] >= NO_SPEECH_S:
        del edges_s[-1]
    else:
        edges_s.append(duration_s)
    return list(zip(edges_s[::2], edges_s[1::2], strict=True))


def _between(chunk: Chunk, start_s: float, end_s: float) -> Chunk:
    first = round(start_s * FRAMES_PER_S) * SAMPLES_PER_FRAME
    first -= (chunk.start_sample + first) % SAMPLES_PER_FRAME if first else 0
    return rest_of(msgspec.structs.replace(chunk, samples=chunk.samples[: round(end_s * SAMPLE_RATE)]), first)


def holds_doubtful(part: DecodedPart, spoken: SpokenChunk) -> bool:
    return any(_is_doubtful(span, part) and not _is_surely_spoken(span, part, spoken) for span in part.spans)


def _is_surely_spoken(span: Span, part: DecodedPart, spoken: SpokenChunk) -> bool:
    return spoken.certainly_spoken_s(part.start_s + span.start_s, part.start_s + span.end_s) >= SURELY_S


async def drop_inventions(
    part: DecodedPart,
    chunk: Chunk,
    spoken: SpokenChunk,
    pool: PreprocessPool,
    num_sent: int = 0,
    may_go_on: bool = True,
) -> DecodedPart:
    """Drop doubtful segments without speech. If speech follows one, end the part before it.

    Args:
        chunk: the audio of the part.
        num_sent: leading segments that a client has already.
        may_go_on: whether a tail can be read.
    """
    kept: list[Span] = []
    is_any_dropped = False
    for number, span in enumerate(part.spans):
        in_doubt = number >= num_sent and (is_any_dropped or _is_doubtful(span, part))
        in_doubt = in_doubt and not _is_surely_spoken(span, part, spoken)
        if not in_doubt or await pool.run(holds_speech, _samples_of(span, chunk)):
            kept.append(span)
            continue
        is_any_dropped = True
        kept_to_s = kept[-1].end_s if kept else 0.0
        tail_s = await _next_speech_s(span, chunk, kept_to_s, pool) if may_go_on else None
        if tail_s is not None:
            kept_part = msgspec.structs.replace(part, spans=tuple(kept))
            return ending_at(kept_part, len(kept), tail_s)
    return msgspec.structs.replace(part, spans=tuple(kept))


async def _next_speech_s(span: Span, chunk: Chunk, kept_to_s: float, pool: PreprocessPool) -> float | None:
    behind = rest_of(chunk, round(span.start_s * SAMPLE_RATE))
    speech_s = await pool.run(next_speech_s, behind.samples, 0.0)
    return None if speech_s is None else tail_before_s(span.start_s + speech_s, kept_to_s, chunk)


def tail_before_s(speech_s: float, kept_to_s: float, chunk: Chunk) -> float | None:
    """Return the time shortly before `speech_s`, outside kept text; None near the chunk's start."""
    tail_s = on_frame_s(max(kept_to_s, speech_s - LEAD_S), chunk)
    return tail_s if tail_s >= MIN_ADVANCE_S else None


def on_frame_s(time_s: float, chunk: Chunk) -> float:
    """Return the time, or the file's next frame behind it."""
    first = math.ceil(time_s * SAMPLE_RATE)
    return (first + -(chunk.start_sample + first) % SAMPLES_PER_FRAME) / SAMPLE_RATE


async def is_surely_speech(chunk: Chunk, pool: PreprocessPool) -> bool:
    """Return whether there is so much certain speech that no other judge may drop the text."""
    stretches_s = await pool.run(certain_speech_s, chunk.samples)
    return sum(end_s - start_s for start_s, end_s in stretches_s) >= SURELY_S


def _is_doubtful(span: Span, part: DecodedPart) -> bool:
    return _are_doubtful(span.logprobs, part.result)


def is_trusted(result: ChunkResult, text: str, duration_s: float) -> bool:
    """Return whether a text fills its time, and is beyond doubt or probable."""
    if not result.logprobs or num_letters(text) < FULL_LETTERS_PER_S * duration_s:
        return False
    is_probable = float(np.mean(result.logprobs)) >= SURE_LOGPROB
    return is_probable or not _are_doubtful(result.logprobs, result)


def _are_doubtful(logprobs: Sequence[float], result: ChunkResult) -> bool:
    return float(np.mean(logprobs)) < DOUBTFUL_LOGPROB or result.no_speech_prob > DOUBTFUL_NO_SPEECH


def _samples_of(span: Span, chunk: Chunk) -> Samples:
    first, end = ((span.start_s - MARGIN_S) * SAMPLE_RATE, (span.end_s + MARGIN_S) * SAMPLE_RATE)
    return chunk.samples[max(0, round(first)) : round(end)]
