"""Words of a transcript: which tokens make one, and when each was said. Used by `segments.py`.

Plain functions on the event loop of the API process. Attention and pauses come with a replica's result: no
model runs here, and no samples are read.

Tokens are grouped as openai/whisper does: by characters, by spaces, punctuation with its word. A token's time
from the alignment is when the attention moves on to it, anywhere between two words, and mostly too early. So
within that time a word begins behind the pauses that lie before its strongest attention. It ends at the
next pause, which may be a little later than the alignment moves on: punctuation is often given the end of
the word before it.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkResult, Word

# The sets of openai/whisper.
WITH_THE_NEXT_WORD: Final = "\"'“¿([{-"
WITH_THE_WORD_BEFORE: Final = "\"'.。,，!！?？:：”)]}、"


class WordGroup(NamedTuple):
    """A word's text, and its tokens; those of punctuation that was joined to it are not counted."""

    text: str
    first: int
    end: int


def group_words(tokens: Sequence[int], tokenizer: Tokenizer, spaced: bool) -> list[WordGroup]:
    """Groups text tokens.

    Args:
        spaced: whether the language puts spaces between words; otherwise every character that tokens make
            is a word.
    """
    groups = list(_characters(tokens, tokenizer))
    words = _join_up_to_spaces(groups) if spaced else groups
    return _join_to_word_before(_join_to_next_word(words))


def _characters(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[WordGroup]:
    """Groups of the fewest tokens that make whole characters; bytes that make none join the group before."""
    decoder, first = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for end, token in enumerate(tokens, start=1):
        decoder.decode(tokenizer.decode_bytes(token))
        pending, _ = decoder.getstate()
        if not pending or end == len(tokens):
            yield WordGroup(tokenizer.decode(tokens[first:end]), first, end)
            first = end


def _join_up_to_spaces(groups: Sequence[WordGroup]) -> list[WordGroup]:
    """Joins groups to words, each of which begins with a space or is punctuation alone."""
    words: list[WordGroup] = []
    for group in groups:
        if not words or group.text.startswith(" ") or group.text.strip() in string.punctuation:
            words.append(group)
        else:
            words[-1] = WordGroup(words[-1].text + group.text, words[-1].first, group.end)
    return words


def _join_to_next_word(words: Sequence[WordGroup]) -> list[WordGroup]:
    joined: list[WordGroup] = []  # from the last on
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in WITH_THE_NEXT_WORD:
            joined[-1] = joined[-1]._replace(text=word.text + joined[-1].text)
        else:
            joined.append(word)
    return joined[::-1]


def _join_to_word_before(words: Sequence[WordGroup]) -> list[WordGroup]:
    joined: list[WordGroup] = []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in WITH_THE_WORD_BEFORE:
            joined[-1] = joined[-1]._replace(text=joined[-1].text + word.text)
        else:
            joined.append(word)
    return joined


MIN_WORD_S: Final = 0.02  # one position of the audio
# A pause of this length parts words; a shorter one may be the closure of a consonant within a word.
PARTING_PAUSE_S: Final = 0.1
PEAK_OFF_S: Final = 0.05  # what attention peaks at may lie so far before the sound that is meant
MAX_PAUSE_WITHIN_S: Final = 0.5  # no word lasts through a longer one
# The end of a word is looked for so far behind the time that the alignment gives.
MAX_LATER_S: Final = 0.5
# Sound before a short pause, such as the closure of a consonant, is the word's own (the s of "still")
# where it is of this length; shorter, it is the end of the word before; longer, it is no speech.
OWN_SOUND_S: Final = (0.15, 0.5)
# A shorter sound is a click, where a pause of a second parts it from what follows.
CLICK_S: Final = 0.06
PAUSE_BEHIND_CLICK_S: Final = 1.0

Pause = tuple[float, float]  # start and end


class AlignedWord(NamedTuple):
    """A word with its times in seconds from the start of the part, like all times in this file."""

    text: str
    start_s: float
    end_s: float
    first_peak_s: float  # where its first token attends to most
    last_peak_s: float


def aligned_word(text: str, result: ChunkResult, first: int, end: int) -> AlignedWord:
    """The word of the text tokens from `first` to before `end`."""
    times_s, peaks_s = result.token_times_s, result.token_peaks_s
    return AlignedWord(text, times_s[first], times_s[end], peaks_s[first], peaks_s[end - 1])


def leave_out_pauses(words: Sequence[AlignedWord], pauses_s: Sequence[Pause], end_s: float) -> list[Word]:
    """Gives each word its time, in order.

    Args:
        words: in order, none beginning before the one before it ends.
        end_s: no word ends later: the end of the audio, or of the stretch that was read.
    """
    pauses_s = _without_clicks(pauses_s)
    words = _behind_the_first_pause(words, pauses_s)
    within = [_without_pauses(word, _pauses_within(pauses_s, word)) for word in words]
    limits_s = [*(word.start_s for word in within[1:]), end_s]
    return [
        _lengthened(word, aligned.end_s, pauses_s, limit_s)
        for word, aligned, limit_s in zip(within, words, limits_s, strict=True)
    ]


def _without_clicks(pauses_s: Sequence[Pause]) -> list[Pause]:
    """Join long pauses with the click before them, at the beginning or behind another long pause."""
    joined: list[Pause] = []
    for start_s, end_s in pauses_s:
        before_s = joined[-1] if joined else (0.0, 0.0)
        is_first = not joined or _is_long(*before_s)
        if is_first and start_s - before_s[1] <= CLICK_S and end_s - start_s >= PAUSE_BEHIND_CLICK_S:
            joined[-1:] = [(before_s[0], end_s)]
        else:
            joined.append((start_s, end_s))
    return joined


def _is_long(start_s: float, end_s: float) -> bool:
    return end_s - start_s > MAX_PAUSE_WITHIN_S


def _behind_the_first_pause(words: Sequence[AlignedWord], pauses_s: Sequence[Pause]) -> list[AlignedWord]:
    """Give words that lie before any sound a share of the first word that has some."""
    if not pauses_s or pauses_s[0][0] > 0.0 or not _is_long(*pauses_s[0]):
        return list(words)
    begins_s = pauses_s[0][1]
    num_before = sum(word.end_s <= begins_s for word in words)
    if not 0 < num_before < len(words):
        return list(words)
    return [*_sharing(words[: num_before + 1], begins_s), *words[num_before + 1 :]]


def _sharing(words: Sequence[AlignedWord], start_s: float) -> list[AlignedWord]:
    """Lay the words behind each other from `start_s` to the end of the last, by their letters."""
    num_letters = list(accumulate((max(1, len(word.text.strip())) for word in words), initial=0))
    per_letter_s = (words[-1].end_s - start_s) / num_letters[-1]
    edges_s = [start_s + per_letter_s * count for count in num_letters]
    return [
        AlignedWord(
            word.text, first_s, end_s, max(first_s, word.first_peak_s), max(first_s, word.last_peak_s)
        )
        for word, (first_s, end_s) in zip(words, pairwise(edges_s), strict=True)
    ]


def _pauses_within(pauses_s: Iterable[Pause], word: AlignedWord) -> list[Pause]:
    return [(start_s, end_s) for start_s, end_s in pauses_s if end_s > word.start_s and start_s < word.end_s]


def _without_pauses(word: AlignedWord, pauses_s: Sequence[Pause]) -> Word:
    """The word without the pauses at its ends; one that lies wholly in silence stays as it is."""
    start_s, end_s = word.start_s, word.end_s
    for pause_start_s, pause_end_s in pauses_s:
        is_parting = pause_end_s - pause_start_s >= PARTING_PAUSE_S
        is_nearer_end = word.first_peak_s > (pause_start_s + pause_end_s) / 2
        is_long = pause_end_s - pause_start_s > MAX_PAUSE_WITHIN_S
        is_own_sound = (
            pause_start_s > start_s + OWN_SOUND_S[0] and pause_start_s < word.start_s + OWN_SOUND_S[1]
        )
        is_before = pause_end_s <= word.first_peak_s + PEAK_OFF_S and (is_parting or not is_own_sound)
        is_before = is_before or (is_long and is_nearer_end)  # attention may peak well before the sound
        if (is_before or pause_start_s <= start_s) and pause_end_s <= end_s - MIN_WORD_S:
            start_s = max(start_s, pause_end_s)
    for pause_start_s, pause_end_s in reversed(pauses_s):
        is_long = pause_end_s - pause_start_s > MAX_PAUSE_WITHIN_S
        is_nearer_start = word.last_peak_s <= (pause_start_s + pause_end_s) / 2
        is_after = pause_end_s >= end_s or (is_long and is_nearer_start)
        if is_after and pause_start_s >= start_s + MIN_WORD_S:
            end_s = pause_start_s
    return Word(word.text, start_s, end_s)


def _lengthened(word: Word, aligned_end_s: float, pauses_s: Iterable[Pause], limit_s: float) -> Word:
    """The word lengthened to the pause behind it, where the sound goes on after its aligned end."""
    if aligned_end_s - word.end_s >= PARTING_PAUSE_S:
        return word
    for start_s, end_s in pauses_s:
        is_end = end_s >= limit_s or end_s - start_s >= PARTING_PAUSE_S
        if end_s <= aligned_end_s or not is_end:
            continue
        if start_s >= limit_s or not aligned_end_s < start_s <= aligned_end_s + MAX_LATER_S:
            break
        return Word(word.text, word.start_s, start_s)
    return word


def words_until(words: Sequence[Word], end_s: float) -> tuple[Word, ...]:
    """The words, the last ones shortened so that none ends behind `end_s`."""
    cut: list[Word] = []
    for word in reversed(words):
        end_s = min(word.end_s, end_s)
        cut.append(Word(word.text, max(0.0, min(word.start_s, end_s - MIN_WORD_S)), end_s))
        end_s = cut[-1].start_s
    return tuple(cut[::-1])
