"""Group tokens into words as openai/whisper does, and give these their times. Stateless.

By its onset a quarter of a token's attention has come. Words that run on meet at the second one's onset;
pauses between the onsets of two words part them. A word that gets seconds of sound, such as another
language, is the short sound beside.
"""

import codecs
import math
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec
import numpy as np

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import Word

# The sets of openai/whisper.
WITH_THE_NEXT_WORD: Final = "\"'“¿([{-"
WITH_THE_WORD_BEFORE: Final = "\"'.。,，!！?？:：”)]}、"


class WordGroup(NamedTuple):
    text: str
    first: int
    end: int


def group_words(tokens: Sequence[int], tokenizer: Tokenizer, spaced: bool) -> list[WordGroup]:
    """Group text tokens. Not `spaced`, every character is a word."""
    groups = list(_characters(tokens, tokenizer))
    words = _join_up_to_spaces(groups) if spaced else groups
    return _join_to_word_before(_join_to_next_word(words))


def _characters(tokens: Sequence[int], tokenizer: Tokenizer) -> Iterator[WordGroup]:
    decoder, first = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
    for end, token in enumerate(tokens, start=1):
        decoder.decode(tokenizer.decode_bytes(token))
        pending, _ = decoder.getstate()
        if not pending or end == len(tokens):
            yield WordGroup(tokenizer.decode(tokens[first:end]), first, end)
            first = end


def _join_up_to_spaces(groups: Sequence[WordGroup]) -> list[WordGroup]:
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
MAX_WORD_S: Final = 2.0
AROUND_ONSET_S: Final = 1.0  # of a longer sound, what is the word's
CLAUSE_ENDS: Final = ".。,，!！?？:：;"
# A pause of this length parts words; a shorter one may be the closure of a consonant within a word.
PARTING_PAUSE_S: Final = 0.1 - 1e-4  # as pauses are sums of 5 ms
MAX_PAUSE_WITHIN_S: Final = 0.5  # no word lasts through a longer one
MAX_OFF_S: Final = 0.5  # a pause farther from a word's edge is not its own
CLICK_S: Final = 0.06  # the longest between noise and the first word

Pause = tuple[float, float]  # start and end


class AlignedWord(NamedTuple):
    text: str
    start_s: float
    end_s: float
    first_onset_s: float  # of its first token's attention
    last_onset_s: float


def aligned_words(
    groups: Sequence[WordGroup], times_s: Sequence[float], onsets_s: Sequence[float]
) -> list[AlignedWord]:
    """Let words follow one another, by when each token begins, when the last one ends, and their onsets."""
    if not groups:
        return []
    starts_s = np.array([onsets_s[group.first] for group in groups])
    if starts_s[0] <= times_s[0] + MAX_OFF_S:  # else the sound before is not the first word's
        starts_s[0] = times_s[0]
    steps_s = MIN_WORD_S * np.arange(len(groups))  # no word is shorter, where there is room
    latest_s = max(0.0, times_s[-1] - MIN_WORD_S * len(groups))
    in_order_s = np.maximum.accumulate(starts_s - steps_s).clip(0.0, latest_s)
    edges_s = [*(in_order_s + steps_s).clip(max=times_s[-1]).tolist(), times_s[-1]]
    return [
        AlignedWord(group.text, *edge_s, onsets_s[group.first], onsets_s[group.end - 1])
        for group, edge_s in zip(groups, pairwise(edges_s), strict=True)
    ]


def leave_out_pauses(words: Sequence[AlignedWord], pauses_s: Sequence[Pause], end_s: float) -> list[Word]:
    """Give each word its time. Words are in order, without overlaps; `end_s` ends what was read."""
    pauses_s = [pause_s for pause_s in pauses_s if pause_s[0] < end_s]
    words = [_short_sound(word, pauses_s) for word in _behind_pauses(words, pauses_s)]
    return [_with_length(word) for word in _parted(words, pauses_s, end_s)]


def _is_long(start_s: float, end_s: float) -> bool:
    return end_s - start_s > MAX_PAUSE_WITHIN_S


def _behind_pauses(words: Sequence[AlignedWord], pauses_s: Sequence[Pause]) -> list[AlignedWord]:
    """Give words in a long pause a share of the word behind; a clause's end stays."""
    moved = list(words)
    for start_s, end_s in pauses_s:
        if not _is_long(start_s, end_s):
            continue
        first = sum(word.start_s < start_s for word in moved)
        behind = sum(word.end_s <= end_s for word in moved)
        ends = [n for n in range(first, behind) if moved[n].text[-1] in CLAUSE_ENDS and start_s > 0]
        first = ends[-1] + 1 if ends else first
        if not first < behind < len(moved):
            continue
        if moved[behind].end_s - end_s >= (behind + 1 - first) * MIN_WORD_S:
            moved[first : behind + 1] = _sharing(moved[first : behind + 1], end_s)
    return moved


def _short_sound(word: AlignedWord, pauses_s: Sequence[Pause]) -> AlignedWord:
    """Shorten a word that lasts too long to a sound between pauses."""
    if word.end_s - word.start_s <= MAX_WORD_S:
        return word
    sounds_s = _sounds_s(word, pauses_s)
    short_s = [(start_s, end_s) for start_s, end_s in sounds_s if end_s - start_s <= MAX_WORD_S]
    if len(short_s) == len(sounds_s):
        return word
    onset_s = word.first_onset_s
    start_s, end_s = min(short_s or sounds_s, key=lambda s: max(s[0] - onset_s, onset_s - s[1], 0.0))
    if not short_s:
        start_s = max(start_s, word.first_onset_s - AROUND_ONSET_S)
        end_s = min(end_s, max(word.last_onset_s, start_s) + AROUND_ONSET_S)
    first_onset_s, last_onset_s = (
        min(max(onset_s, start_s), end_s) for onset_s in (word.first_onset_s, word.last_onset_s)
    )
    return AlignedWord(word.text, start_s, end_s, first_onset_s, last_onset_s)


def _sounds_s(word: AlignedWord, pauses_s: Sequence[Pause]) -> list[Pause]:
    long_s = [pause_s for pause_s in _pauses_within(pauses_s, word) if _is_long(*pause_s)]
    starts_s = [word.start_s, *(end_s for _, end_s in long_s)]
    ends_s = [*(start_s for start_s, _ in long_s), word.end_s]
    return [(a, b) for a, b in zip(starts_s, ends_s, strict=True) if b - a >= MIN_WORD_S]


def _sharing(words: Sequence[AlignedWord], start_s: float) -> list[AlignedWord]:
    return [
        AlignedWord(
            word.text, first_s, end_s, max(first_s, word.first_onset_s), max(first_s, word.last_onset_s)
        )
        for word, (first_s, end_s) in zip(
            words, edges_by_letters([word.text for word in words], start_s, words[-1].end_s), strict=True
        )
    ]


def _pauses_within(pauses_s: Iterable[Pause], word: AlignedWord) -> list[Pause]:
    return [(start_s, end_s) for start_s, end_s in pauses_s if end_s > word.start_s and start_s < word.end_s]


def _parted(words: Sequence[AlignedWord], pauses_s: Sequence[Pause], end_s: float) -> list[Word]:
    """End each word at the first pause before the next one's onset, and begin that behind the last pause."""
    if not words:
        return []
    first_s = words[0].start_s
    first, last = AlignedWord("", 0.0, first_s, 0.0, 0.0), AlignedWord("", end_s, end_s, math.inf, math.inf)
    parted: list[Word] = []
    start_s = -math.inf
    for word, behind in pairwise([first, *words, last]):
        between_s = _pauses_between(word, behind, pauses_s)
        earliest_s, latest_s = behind.start_s - MAX_OFF_S, behind.end_s - MIN_WORD_S
        next_s = max((b for _, b in between_s if earliest_s <= b <= latest_s), default=behind.start_s)
        earliest_s, latest_s = start_s + MIN_WORD_S, min(next_s, word.end_s + MAX_OFF_S)
        stop_s = min((a for a, _ in between_s if earliest_s <= a <= latest_s), default=word.end_s)
        parted.append(Word(word.text, start_s, stop_s))
        start_s = max(stop_s, next_s)
    return parted[1:]


def _pauses_between(word: AlignedWord, behind: AlignedWord, pauses_s: Iterable[Pause]) -> list[Pause]:
    """Return those between the words' onsets, and what lies over their edge."""
    click_s = 0.0 if word.text else CLICK_S  # between noise and the first word
    return [
        (start_s, end_s)
        for start_s, end_s in pauses_s
        if (
            end_s - start_s >= PARTING_PAUSE_S
            and word.last_onset_s < (start_s + end_s) / 2 <= behind.first_onset_s
        )
        or (start_s <= word.end_s and end_s >= behind.start_s - click_s)
    ]


def _with_length(word: Word) -> Word:
    return Word(word.text, word.start_s, min(word.end_s, word.start_s + MAX_WORD_S))


def edges_by_letters(texts: Sequence[str], start_s: float, end_s: float) -> list[Pause]:
    num_letters = list(accumulate((max(1, len(text.strip())) for text in texts), initial=0))
    per_letter_s = (end_s - start_s) / max(1, num_letters[-1])
    return list(pairwise(start_s + per_letter_s * count for count in num_letters))


def words_until(words: Sequence[Word], end_s: float) -> tuple[Word, ...]:
    cut: list[Word] = []
    for word in reversed(words):
        end_s = min(word.end_s, end_s)
        start_s = max(0.0, min(word.start_s, end_s - MIN_WORD_S))
        cut.append(msgspec.structs.replace(word, start_s=start_s, end_s=end_s))
        end_s = cut[-1].start_s
    return tuple(cut[::-1])
