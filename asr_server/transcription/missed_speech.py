"""Find certain speech that a part's text leaves out, so that it is read again from there.

Models end early after a long pause or a repetition, skip one of two languages, and lose sentences inside a
segment. Between segments a gap must hold more than their times may be off. Inside, a segment leaves speech
out if it holds far more than its letters fill, or, where words have times, if no word lies in a stretch.
What is inside a segment is read again in two pieces, parted at a pause: the same audio has the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Final

import msgspec

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.voice import (
    FRAME_S,
    MIN_CERTAIN_FRAMES,
    MISSED_S,
    PAUSE_S,
    SHORT_PAUSE_S,
    first_missed_s,
    missed_speech_s,
)
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, Word
from asr_server.levels import Stretch
from asr_server.transcription.segments import DecodedPart, Span, ending_at
from asr_server.transcription.voice_check import (
    LEAD_S,
    MARGIN_S,
    MIN_ADVANCE_S,
    SURELY_S,
    SpokenChunk,
    on_frame_s,
    tail_before_s,
)
from asr_server.transcription.words import num_letters

MIN_REST_S: Final = PAUSE_S + MIN_CERTAIN_FRAMES * FRAME_S  # a shorter one cannot hold a pause and a word
# Letters for a second of certain speech: a reader says 11 to 17, a speech of Kennedy's has 7.5. With fewer,
# and a pause of a second within, a segment may have lost a sentence.
FEWEST_LETTERS_PER_S: Final = 7.0
# What one word of known time may fill: drawn out, or of many letters.
SLOW_WORD_S: Final = 1.5
SLOW_LETTERS_PER_S: Final = 5.0
TOUCHING_S: Final = 0.1  # a word that reaches less far into a stretch is not of it


async def until_missed_speech(
    part: DecodedPart, chunk: Chunk, pool: PreprocessPool, num_sent: int = 0
) -> DecodedPart | None:
    """Return the part up to the first gap with speech; None if there is none.

    Gaps behind sent segments are checked, the last up to the unread tail.
    """
    for number, (end_s, start_s) in enumerate(_gaps_s(part)):
        if number < num_sent or start_s - end_s < MIN_REST_S:
            continue
        gap = chunk.samples[round(end_s * SAMPLE_RATE) : round(start_s * SAMPLE_RATE)]
        speech_s = await pool.run(missed_speech_s, gap)
        tail_s = None if speech_s is None else tail_before_s(end_s + speech_s, end_s, chunk)
        if tail_s is not None:
            return ending_at(part, number, tail_s)
    return None


def holds_gap_with_speech(part: DecodedPart, spoken: SpokenChunk) -> bool:
    """Return whether a gap before a segment is long, or surely holds speech."""
    for end_s, start_s in _gaps_s(part)[:-1]:
        behind = spoken.since(part.start_s + end_s)
        speech_s = behind.certain_within(0.0, start_s - end_s)
        if start_s - end_s >= MISSED_S or first_missed_s(speech_s) is not None:
            return True
    return False


def _gaps_s(part: DecodedPart) -> list[Stretch]:
    ends_s = [0.0, *(span.end_s for span in part.spans)]
    last_s = part.duration_s if part.tail_s is None else part.tail_s
    return list(zip(ends_s, [*(span.start_s for span in part.spans), last_s], strict=True))


def until_left_out(
    part: DecodedPart, chunk: Chunk, spoken: SpokenChunk, tokenizer: Tokenizer, num_sent: int = 0
) -> DecodedPart | None:
    """Return the part up to speech that is left out at its start or inside a segment; None if none is."""
    if num_sent == 0 and (none := _without_beginning(part, chunk, spoken)) is not None:
        return none
    cut = until_overlong(part, chunk, spoken, tokenizer, num_sent)
    return _until_wordless(cut or part, chunk, spoken.since(part.start_s), num_sent) or cut


def _without_beginning(part: DecodedPart, chunk: Chunk, spoken: SpokenChunk) -> DecodedPart | None:
    """Return a part without text, to be read again in two, if much speech comes before its first segment."""
    spoken, (_, end_s) = spoken.since(part.start_s), _gaps_s(part)[0]
    if spoken.certainly_spoken_s(0.0, end_s) < MISSED_S:
        return None
    pause_s = max(_pauses_s(0.0, end_s + MARGIN_S, spoken), key=_length_s, default=(0.0, 0.0))
    return _cut(part, chunk, 0, 0.0, _middle_s(pause_s)) if _length_s(pause_s) >= SHORT_PAUSE_S else None


def until_overlong(
    part: DecodedPart, chunk: Chunk, spoken: SpokenChunk, tokenizer: Tokenizer, num_sent: int = 0
) -> DecodedPart | None:
    """Return the part up to a segment with more speech than its letters fill, around a pause."""
    spoken = spoken.since(part.start_s)
    for number in range(num_sent, len(part.spans)):
        span = part.spans[number]
        start_s = max(span.start_s, _end_s(part.spans[number - 1]) if number else 0.0)
        letters_s = num_letters(tokenizer.decode(span.tokens)) / FEWEST_LETTERS_PER_S
        if spoken.certainly_spoken_s(start_s, span.end_s) - letters_s < SURELY_S:
            continue
        pause_s = _longest_pause_s(start_s, span.end_s, spoken)
        if pause_s is not None:
            return _cut(part, chunk, number, start_s, _middle_s(pause_s))
    return None


def _longest_pause_s(start_s: float, end_s: float, spoken: SpokenChunk) -> Stretch | None:
    pauses_s = [
        (last_s, next_s)
        for last_s, next_s in _pauses_s(start_s, end_s, spoken)
        if next_s - last_s >= PAUSE_S
        and spoken.certainly_spoken_s(start_s, last_s) >= SURELY_S
        and spoken.certainly_spoken_s(next_s, end_s) >= SURELY_S
    ]
    return max(pauses_s, key=_length_s, default=None)


def _pauses_s(start_s: float, end_s: float, spoken: SpokenChunk) -> list[Stretch]:
    pauses_s = [(before[1], behind[0]) for before, behind in pairwise(spoken.possible_s)]
    return [(last_s, next_s) for last_s, next_s in pauses_s if start_s <= last_s and next_s <= end_s]


def _length_s(stretch_s: Stretch) -> float:
    return stretch_s[1] - stretch_s[0]


def _middle_s(pause_s: Stretch) -> float:
    return (pause_s[0] + pause_s[1]) / 2


def _until_wordless(
    part: DecodedPart, chunk: Chunk, spoken: SpokenChunk, num_sent: int
) -> DecodedPart | None:
    """Return the part up to certain speech without words; None if there is none, or words have no times."""
    for first_s, last_s in _wordless_s(part, spoken, num_sent):
        num_kept = sum(_end_s(span) <= first_s + TOUCHING_S for span in part.spans)
        if num_kept < num_sent:
            continue
        starts_s = [word.start_s for span in part.spans[num_kept:] for word in span.words]
        from_s = min([first_s, *starts_s])
        pauses_s = _pauses_s(last_s, part.duration_s, spoken)
        long_s = [pause_s for pause_s in pauses_s if _length_s(pause_s) >= SHORT_PAUSE_S]
        if long_s:
            return _cut(part, chunk, num_kept, from_s, _middle_s(long_s[0]))
        if from_s - LEAD_S >= MIN_ADVANCE_S:
            return _cut(part, chunk, num_kept, from_s)
    return None


def _wordless_s(part: DecodedPart, spoken: SpokenChunk, num_sent: int) -> Iterator[Stretch]:
    words = [word for span in part.spans for word in span.words]
    if not words:
        return
    sent_to_s = _end_s(part.spans[num_sent - 1]) if num_sent else 0.0
    end_s = part.duration_s if part.tail_s is None else part.tail_s
    for is_wordless, group in groupby(spoken.certain_within(sent_to_s, end_s), partial(_is_wordless, words)):
        run_s = list(group)
        if is_wordless and max(map(_length_s, run_s)) >= SURELY_S:
            yield run_s[0][0], run_s[-1][1]


def _is_wordless(words: Sequence[Word], stretch_s: Stretch) -> bool:
    filled_s = _filled_s(words, stretch_s)
    return filled_s == 0 or _length_s(stretch_s) - filled_s >= SURELY_S


def _filled_s(words: Sequence[Word], stretch_s: Stretch) -> float:
    within = [word for word in words if _reaches_into(word, stretch_s)]
    return sum(max(SLOW_WORD_S, num_letters(word.text) / SLOW_LETTERS_PER_S) for word in within)


def _reaches_into(word: Word, stretch_s: Stretch) -> bool:
    overlap_s = min(word.end_s, stretch_s[1]) - max(word.start_s, stretch_s[0])
    return overlap_s > min(TOUCHING_S, (word.end_s - word.start_s) / 2)


def _end_s(span: Span) -> float:
    return span.words[-1].end_s if span.words else span.end_s


def _cut(
    part: DecodedPart, chunk: Chunk, num_kept: int, from_s: float, split_s: float | None = None
) -> DecodedPart:
    """Return the part's first spans; the rest is read again from shortly before `from_s`."""
    kept_to_s = _end_s(part.spans[num_kept - 1]) if num_kept else 0.0
    tail_s = on_frame_s(max(kept_to_s, from_s - LEAD_S), chunk)
    cut = ending_at(part, num_kept, tail_s)
    return msgspec.structs.replace(
        cut, split_s=None if split_s is None else on_frame_s(split_s, chunk) - tail_s
    )
