"""Judge a part: which segments stand, which are dropped, and from where the audio is read again.

Pure functions. What a stream may send early is judged by the same rules, so nothing sent is taken back.

Times of a model may be seconds too early, it invents text where nobody speaks, repeats sentences over another
language or music, ends early after a pause, and loses sentences.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Final

import msgspec

from asr_server.audio.voice import first_missed_s
from asr_server.checkpoint.tokenizer import MIN_TAIL_S, Tokenizer, num_letters
from asr_server.core import Chunk, Word
from asr_server.levels import Interval
from asr_server.transcription.heard import (
    MARGIN_S,
    SURELY_S,
    Heard,
    segment_evidence,
    segment_probability,
)
from asr_server.transcription.segments import DecodedPart, Span, ending_at, on_frame_s, with_dropped

LEAST_SAID: Final = 0.5  # the probability from which a segment counts as said
SURELY_SAID: Final = 0.9
FULL_LETTERS_PER_S: Final = 5.0  # a reader says 11 to 17: text of less has lost the times of its words
MIN_LETTERS: Final = 12  # people say shorter sentences twice ("Yes, yes.")
MOST_LETTERS_PER_S: Final = 30.0  # nobody says more
# Letters for a second of certain speech: a reader says 11 to 17, a speech of Kennedy's has 7.5. A segment
# with fewer may have lost a sentence.
FEWEST_LETTERS_PER_S: Final = 7.0
# Text of more has no sentence missing, whatever the times of its words: pauses do not count here.
MANY_LETTERS_PER_S: Final = 12.0
# What one word of known time may fill: drawn out, or of many letters.
SLOW_WORD_S: Final = 1.5
SLOW_LETTERS_PER_S: Final = 5.0
TOUCHING_S: Final = 0.1  # a word that reaches less far into an interval is not of it
SHORT_PAUSE_S: Final = 0.3  # at least: up to there certain speech without words is read again
LEAD_S: Final = 0.3  # before speech that was passed over
MIN_ADVANCE_S: Final = 0.5  # from a chunk's start to where it is read again: the same audio has the same text


class Known(msgspec.Struct, frozen=True):
    heard: Heard
    tokenizer: Tokenizer
    prompt: Collection[str] = ()  # letters of the sentences that it was read with
    before: str = ""  # letters of the segment before the part
    num_sent: int = 0  # leading segments that a client has already
    may_go_on: bool = True  # whether a tail can be read
    may_complete: bool = True  # whether speech without words can be read again
    is_again: bool = False  # the part is such speech


def judge(part: DecodedPart, chunk: Chunk, known: Known) -> DecodedPart:
    """Return the part with the segments that stand, its dropped ones, and where reading goes on."""
    if known.is_again and not any(is_said(span, part, known) for span in part.spans):
        known = msgspec.structs.replace(known, may_go_on=False, may_complete=False)
    if known.may_go_on:
        part = _until_repetition(part, known)
    voiced = _without_inventions(part, chunk, known)
    voiced = with_dropped(voiced, part.spans, "no_voice", known.tokenizer)
    kept = _without_echoes(voiced, known)
    kept = with_dropped(kept, voiced.spans, "echo", known.tokenizer)
    if known.may_go_on:
        kept = _until_gap(kept, chunk, known)
    if known.may_complete and not kept.result.is_full:
        kept = _until_wordless(kept, chunk, known)
    return kept


def may_leave(early: DecodedPart, chunk: Chunk, known: Known) -> bool:
    """Return whether closed segments of a part under way stand, whatever follows."""
    known = msgspec.structs.replace(known, num_sent=0)
    early = msgspec.structs.replace(early, tail_s=early.spans[-1].end_s if early.spans else 0.0)
    is_kept = judge(early, chunk, known) == early
    return is_kept and not (known.may_complete and _is_overlong(early, known))


@lru_cache(1024)
def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def letters_of(span: Span, tokenizer: Tokenizer) -> str:
    return _letters(tokenizer.decode(span.tokens))


def sentences_of(parts: Sequence[DecodedPart], tokenizer: Tokenizer) -> set[str]:
    letters = {letters_of(span, tokenizer) for part in parts for span in part.spans}
    return {text for text in letters if len(text) >= MIN_LETTERS}


def _until_repetition(part: DecodedPart, known: Known) -> DecodedPart:
    for number in range(known.num_sent, len(part.spans)):
        if letters_of(part.spans[number], known.tokenizer) in known.prompt:
            tail_s = part.spans[number - 1].end_s if number else 0.0
            has_tail = part.duration_s - tail_s >= MIN_TAIL_S
            cut = ending_at(part, number, tail_s, "prompt_repeated")
            return cut if has_tail else msgspec.structs.replace(cut, tail_s=None)
    return part


def _without_echoes(part: DecodedPart, known: Known) -> DecodedPart:
    kept: list[Span] = []
    before = known.before
    for number, span in enumerate(part.spans):
        letters = letters_of(span, known.tokenizer)
        is_equal = letters == before and len(letters) >= MIN_LETTERS
        if number < known.num_sent or not is_equal or _has_room(span, part, known.heard, len(letters)):
            kept.append(span)
        before = letters
    return msgspec.structs.replace(part, spans=tuple(kept))


def _has_room(span: Span, part: DecodedPart, heard: Heard, letters: int) -> bool:
    spoken_s = heard.certainly_spoken_s(part.start_s + span.start_s, part.start_s + span.end_s)
    return not heard.certain_s or spoken_s >= letters / MOST_LETTERS_PER_S


def evidence_of(span: Span, part: DecodedPart, known: Known, is_heard: bool = True) -> list[float]:
    start_s, end_s = part.start_s + span.start_s, part.start_s + span.end_s
    frames = known.heard.voice(start_s, end_s) if is_heard else None
    num, no_speech_prob = known.tokenizer.num_letters(span.tokens), part.result.no_speech_prob
    return segment_evidence(span.logprobs, no_speech_prob, num, end_s - start_s, frames)


def said_probability(span: Span, part: DecodedPart, known: Known, is_heard: bool = True) -> float:
    """Return how probable it is that somebody says this text, without `is_heard` by its likelihood alone."""
    return segment_probability(evidence_of(span, part, known, is_heard))


def is_said(span: Span, part: DecodedPart, known: Known) -> bool:
    """Return whether somebody says this text, which must have room in the audio read."""
    most_letters = MOST_LETTERS_PER_S * (part.duration_s + MARGIN_S)
    has_room = known.tokenizer.num_letters(span.tokens) <= most_letters
    return not known.heard.is_checked or (has_room and said_probability(span, part, known) >= LEAST_SAID)


def is_drowned(span: Span, part: DecodedPart, known: Known) -> bool:
    """Return whether a text is likely but the detector is in doubt, as under loud music."""
    if part.result.num_fallbacks:  # a reading uncut climbs no ladder
        return False
    is_likely = said_probability(span, part, known, is_heard=False) >= LEAST_SAID
    return is_likely and said_probability(span, part, known) < SURELY_SAID


def is_trusted(part: DecodedPart, known: Known) -> bool:
    """Return whether all text is said and fills its time."""
    num = known.tokenizer.num_letters(part.result.tokens)
    is_full = num >= max(1.0, FULL_LETTERS_PER_S * part.duration_s)
    return is_full and all(is_said(span, part, known) for span in part.spans)


def _without_inventions(part: DecodedPart, chunk: Chunk, known: Known) -> DecodedPart:
    """Drop what nobody says. If speech follows it, end the part before it: its time was too early."""
    kept: list[Span] = []
    for number, span in enumerate(part.spans):
        if number < known.num_sent or is_said(span, part, known):
            kept.append(span)
            continue
        behind_s = known.heard.certain(part.start_s + span.start_s, part.start_s + part.duration_s)
        kept_to_s = kept[-1].end_s if kept else 0.0
        tail_s = _tail_before_s(behind_s[0][0] - part.start_s, kept_to_s, chunk) if behind_s else None
        if known.may_go_on and tail_s is not None:
            kept_part = msgspec.structs.replace(part, spans=tuple(kept))
            return ending_at(kept_part, len(kept), tail_s, "speech_passed_over")
    return msgspec.structs.replace(part, spans=tuple(kept))


def _tail_before_s(speech_s: float, kept_to_s: float, chunk: Chunk) -> float | None:
    """Return the time shortly before `speech_s`, outside kept text; None near the part's start."""
    tail_s = on_frame_s(max(kept_to_s, speech_s - LEAD_S), chunk)
    return tail_s if tail_s >= MIN_ADVANCE_S else None


def _until_gap(part: DecodedPart, chunk: Chunk, known: Known) -> DecodedPart:
    """Return the part up to the first gap with missed speech."""
    ends_s = [0.0, *(span.end_s for span in part.spans)]
    starts_s = [*(span.start_s for span in part.spans), part.read_to_s]
    for number, (end_s, start_s) in enumerate(zip(ends_s, starts_s, strict=True)):
        certain_s = known.heard.certain(part.start_s + end_s, part.start_s + start_s)
        from_s = first_missed_s([(a - part.start_s - end_s, b - part.start_s - end_s) for a, b in certain_s])
        tail_s = None if from_s is None else _tail_before_s(end_s + from_s, end_s, chunk)
        if number >= known.num_sent and tail_s is not None:
            return ending_at(part, number, tail_s, "speech_passed_over")
    return part


def full_letters(heard: Heard, chunk: Chunk) -> int:
    """Return how many letters leave none of a stretch's certain speech without text."""
    return max(1, math.ceil(MANY_LETTERS_PER_S * heard.spoken_in_s(chunk)))


def _until_wordless(part: DecodedPart, chunk: Chunk, known: Known) -> DecodedPart:
    """Return the part up to certain speech without words, read again up to the next pause."""
    for first_s, last_s in _wordless_s(part, known):
        num_kept = sum(_end_s(span) <= first_s + TOUCHING_S for span in part.spans)
        if num_kept < known.num_sent:
            continue
        starts_s = [word.start_s for span in part.spans[num_kept:] for word in span.words]
        from_s = min([first_s, *starts_s])
        pauses_s = known.heard.pauses(part.start_s + last_s, part.start_s + part.duration_s)
        long_s = [(a, b) for a, b in pauses_s if b - a >= SHORT_PAUSE_S]
        if long_s:
            split_s = sum(long_s[0]) / 2 - part.start_s
            cut = _cut(part, chunk, num_kept, from_s, split_s)
            return msgspec.structs.replace(cut, is_rest_unsaid=_is_unsaid(part, known, split_s))
        if from_s - LEAD_S >= MIN_ADVANCE_S:
            return _cut(part, chunk, num_kept, from_s)
    return part


def _is_unsaid(part: DecodedPart, known: Known, from_s: float) -> bool:
    """Return whether the part has neither text nor certain speech from there on."""
    has_text = part.tail_s is not None or any(_end_s(span) > from_s for span in part.spans)
    return not has_text and not known.heard.certain(part.start_s + from_s, part.start_s + part.duration_s)


def _wordless_s(part: DecodedPart, known: Known) -> Iterator[Interval]:
    words = [word for span in part.spans for word in span.words]
    if part.spans and not words:  # a part under way
        return
    sent_to_s = _end_s(part.spans[known.num_sent - 1]) if known.num_sent else 0.0
    certain_s = [
        (a - part.start_s, b - part.start_s)
        for a, b in known.heard.certain(part.start_s + sent_to_s, part.start_s + part.read_to_s)
    ]
    for is_wordless, group in groupby(certain_s, partial(_is_wordless, words)):
        run_s = list(group)
        if is_wordless and max(last_s - first_s for first_s, last_s in run_s) >= SURELY_S:
            yield run_s[0][0], run_s[-1][1]


def _is_wordless(words: Sequence[Word], interval_s: Interval) -> bool:
    filled_s = sum(
        max(SLOW_WORD_S, num_letters(word.text) / SLOW_LETTERS_PER_S)
        for word in words
        if _reaches_into(word, interval_s)
    )
    return filled_s == 0 or interval_s[1] - interval_s[0] - filled_s >= SURELY_S


def _reaches_into(word: Word, interval_s: Interval) -> bool:
    overlap_s = min(word.end_s, interval_s[1]) - max(word.start_s, interval_s[0])
    return overlap_s > min(TOUCHING_S, (word.end_s - word.start_s) / 2)


def _is_overlong(part: DecodedPart, known: Known) -> bool:
    """Return whether a segment has too few letters for the speech since the one before it."""
    starts_s = [0.0, *(span.end_s for span in part.spans)]
    return any(
        known.heard.certainly_spoken_s(part.start_s + start_s, part.start_s + span.end_s)
        - known.tokenizer.num_letters(span.tokens) / FEWEST_LETTERS_PER_S
        >= SURELY_S
        for start_s, span in zip(starts_s, part.spans, strict=False)
    )


def _end_s(span: Span) -> float:
    return span.words[-1].end_s if span.words else span.end_s


def _cut(
    part: DecodedPart, chunk: Chunk, num_kept: int, from_s: float, split_s: float | None = None
) -> DecodedPart:
    """Return the part's first spans; the rest is read again from shortly before `from_s`."""
    kept_to_s = _end_s(part.spans[num_kept - 1]) if num_kept else 0.0
    tail_s = on_frame_s(max(kept_to_s, from_s - LEAD_S), chunk)
    cut = ending_at(part, num_kept, tail_s, "speech_passed_over")
    return msgspec.structs.replace(
        cut, split_s=None if split_s is None else on_frame_s(split_s, chunk) - tail_s
    )
