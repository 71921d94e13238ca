"""Group tokens into words as openai/whisper does, and give these their times. Stateless.

Alignment marks when attention moves on, mostly too early: a word begins behind the pauses before its
strongest attention, and ends at the next pause, since punctuation often takes the end of a word. A word that
gets seconds of sound, such as another language, is the short sound beside.
"""

import codecs
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec

from asr_server.checkpoint.tokenizer import Tokenizer, num_letters
from asr_server.core import ChunkResult, Word
from asr_server.levels import runs

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
AROUND_PEAK_S: Final = 1.0  # of a longer sound, what is the word's
MAX_HURRIED: Final = 2  # words in a row that last no longer than
HURRIED_S: Final = MIN_WORD_S + 1e-4
CLAUSE_ENDS: Final = ".。,，!！?？:：;"
# A pause of this length parts words; a shorter one may be the closure of a consonant within a word.
PARTING_PAUSE_S: Final = 0.1
PEAK_OFF_S: Final = 0.05  # what attention peaks at may lie so far before the sound that is meant
MAX_PAUSE_WITHIN_S: Final = 0.5  # no word lasts through a longer one
# The end of a word is looked for so far behind the time that the alignment gives.
MAX_LATER_S: Final = 0.5
# Sound before a short pause, such as the closure of a consonant, is the word's own (the s of "still")
# where it is of this length; shorter, it is the end of the word before; longer, it is no speech.
OWN_SOUND_S: Final = (0.15, 0.5)
# Between words that run on, attention moves on before the sound, the more the longer the word: a token stands
# for several letters. Of a voice with known phonemes, at three tempos. Behind a pause the median is 0.01 s.
LEAD_S: Final = 0.02
LEAD_PER_LETTER_S: Final = 0.014  # of the word before
TOUCHING_S: Final = 0.03
# A shorter sound is a click, where a pause of a second parts it from what follows.
CLICK_S: Final = 0.06
PAUSE_BEHIND_CLICK_S: Final = 1.0

Pause = tuple[float, float]  # start and end


class AlignedWord(NamedTuple):
    text: str
    start_s: float
    end_s: float
    first_peak_s: float  # where its first token attends to most
    last_peak_s: float


def aligned_word(text: str, result: ChunkResult, first: int, end: int) -> AlignedWord:
    times_s, peaks_s = result.token_times_s, result.token_peaks_s
    return AlignedWord(text, times_s[first], times_s[end], peaks_s[first], peaks_s[end - 1])


def leave_out_pauses(words: Sequence[AlignedWord], pauses_s: Sequence[Pause], end_s: float) -> list[Word]:
    """Give each word its time. Words are in order, without overlaps; `end_s` ends what was read."""
    pauses_s = _without_clicks(pauses_s)
    words = _behind_other_speech(_behind_pauses(words, pauses_s), pauses_s)
    words = [_short_sound(word, pauses_s) for word in words]
    within = [_without_pauses(word, _pauses_within(pauses_s, word)) for word in words]
    limits_s = [*(word.start_s for word in within[1:]), end_s]
    lengthened = [
        _lengthened(word, aligned.end_s, pauses_s, limit_s)
        for word, aligned, limit_s in zip(within, words, limits_s, strict=True)
    ]
    return _unhurried([_with_length(word) for word in lengthened])


def without_lead(words: Sequence[Word]) -> list[Word]:
    """Move the edges of words that run on later, by half of the word behind at most."""
    moved, before_s = list(words), 0.0
    for number, (word, behind) in enumerate(pairwise(words)):
        is_behind_pause = _is_long(before_s, word.start_s)
        before_s = word.end_s
        if behind.start_s - word.end_s < TOUCHING_S and not is_behind_pause:
            room_s = max(0.0, behind.end_s - behind.start_s - MIN_WORD_S)
            lead_s = LEAD_S + LEAD_PER_LETTER_S * num_letters(word.text)
            edge_s = behind.start_s + min(lead_s, room_s / 2)
            moved[number] = _with_length(Word(word.text, moved[number].start_s, edge_s))
            moved[number + 1] = Word(behind.text, edge_s, behind.end_s)
    return moved


def _without_clicks(pauses_s: Sequence[Pause]) -> list[Pause]:
    """Join long pauses with a click before them, at the start or behind another long pause."""
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


def _behind_other_speech(words: Sequence[AlignedWord], pauses_s: Sequence[Pause]) -> list[AlignedWord]:
    """Give a clause's first word, on seconds of speech before a long pause, a share of the second."""
    moved = list(words)
    for number, (word, behind) in enumerate(pairwise(words)):
        is_within = number > 0 and words[number - 1].text[-1] not in CLAUSE_ENDS
        sounds_s = _sounds_s(word, pauses_s)
        if is_within or word.text[-1] in CLAUSE_ENDS or not sounds_s:
            continue
        pause_s = max(_pauses_within(pauses_s, word), default=(0.0, 0.0))
        is_last = sounds_s[-1][1] == pause_s[0] and _is_long(*pause_s)
        has_room = behind.end_s - pause_s[1] >= 2 * MIN_WORD_S
        if is_last and has_room and all(end_s - start_s > MAX_WORD_S for start_s, end_s in sounds_s):
            moved[number : number + 2] = _sharing([word, behind], pause_s[1])
    return moved


def _short_sound(word: AlignedWord, pauses_s: Sequence[Pause]) -> AlignedWord:
    """Shorten a word that lasts too long to a sound between pauses."""
    if word.end_s - word.start_s <= MAX_WORD_S:
        return word
    sounds_s = _sounds_s(word, pauses_s)
    short_s = [(start_s, end_s) for start_s, end_s in sounds_s if end_s - start_s <= MAX_WORD_S]
    if len(short_s) == len(sounds_s):
        return word
    peak_s = word.first_peak_s
    start_s, end_s = min(short_s or sounds_s, key=lambda s: max(s[0] - peak_s, peak_s - s[1], 0.0))
    if not short_s:
        start_s = max(start_s, word.first_peak_s - AROUND_PEAK_S)
        end_s = min(end_s, max(word.last_peak_s, start_s) + AROUND_PEAK_S)
    first_peak_s, last_peak_s = (
        min(max(peak_s, start_s), end_s) for peak_s in (word.first_peak_s, word.last_peak_s)
    )
    return AlignedWord(word.text, start_s, end_s, first_peak_s, last_peak_s)


def _sounds_s(word: AlignedWord, pauses_s: Sequence[Pause]) -> list[Pause]:
    long_s = [pause_s for pause_s in _pauses_within(pauses_s, word) if _is_long(*pause_s)]
    starts_s = [word.start_s, *(end_s for _, end_s in long_s)]
    ends_s = [*(start_s for start_s, _ in long_s), word.end_s]
    return [(a, b) for a, b in zip(starts_s, ends_s, strict=True) if b - a >= MIN_WORD_S]


def _sharing(words: Sequence[AlignedWord], start_s: float) -> list[AlignedWord]:
    return [
        AlignedWord(
            word.text, first_s, end_s, max(first_s, word.first_peak_s), max(first_s, word.last_peak_s)
        )
        for word, (first_s, end_s) in zip(
            words, edges_by_letters([word.text for word in words], start_s, words[-1].end_s), strict=True
        )
    ]


def _pauses_within(pauses_s: Iterable[Pause], word: AlignedWord) -> list[Pause]:
    return [(start_s, end_s) for start_s, end_s in pauses_s if end_s > word.start_s and start_s < word.end_s]


def _without_pauses(word: AlignedWord, pauses_s: Sequence[Pause]) -> Word:
    start_s, end_s = word.start_s, word.end_s
    for pause_start_s, pause_end_s in pauses_s:
        is_parting = pause_end_s - pause_start_s >= PARTING_PAUSE_S
        is_nearer_end = word.first_peak_s > (pause_start_s + pause_end_s) / 2
        is_long = _is_long(pause_start_s, pause_end_s)
        is_own_sound = (
            pause_start_s > start_s + OWN_SOUND_S[0] and pause_start_s < word.start_s + OWN_SOUND_S[1]
        )
        is_before = pause_end_s <= word.first_peak_s + PEAK_OFF_S and (is_parting or not is_own_sound)
        is_before = is_before or (is_long and is_nearer_end)  # attention may peak well before the sound
        if (is_before or pause_start_s <= start_s) and pause_end_s <= end_s - MIN_WORD_S:
            start_s = max(start_s, pause_end_s)
    for pause_start_s, pause_end_s in reversed(pauses_s):
        is_long = _is_long(pause_start_s, pause_end_s)
        is_nearer_start = word.last_peak_s <= (pause_start_s + pause_end_s) / 2
        is_after = pause_end_s >= end_s or (is_long and is_nearer_start)
        if is_after and pause_start_s >= start_s + MIN_WORD_S:
            end_s = pause_start_s
    return Word(word.text, start_s, end_s)


def _lengthened(word: Word, aligned_end_s: float, pauses_s: Iterable[Pause], limit_s: float) -> Word:
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


def _with_length(word: Word) -> Word:
    return Word(word.text, word.start_s, min(word.end_s, word.start_s + MAX_WORD_S))


def _unhurried(words: list[Word]) -> list[Word]:
    """Lay words without length over the longer neighbour that they touch."""
    shared = list(words)
    for first, end in runs([word.end_s - word.start_s <= HURRIED_S for word in words]).tolist():
        if end - first <= MAX_HURRIED:
            continue
        if end < len(words) and words[end].start_s - words[end - 1].end_s < PARTING_PAUSE_S:
            end += 1
        elif first and words[first].start_s - words[first - 1].end_s < PARTING_PAUSE_S:
            first -= 1
        edges_s = edges_by_letters(
            [word.text for word in words[first:end]], words[first].start_s, words[end - 1].end_s
        )
        shared[first:end] = [
            Word(word.text, *each) for word, each in zip(words[first:end], edges_s, strict=True)
        ]
    return shared


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
