from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from whisper.timing import WordTiming, merge_punctuations
from whisper.tokenizer import get_tokenizer

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Samples, Segment, Word
from asr_server.transcription.segments import decode_part, segments_of
from asr_server.transcription.word_times import (
    MAX_WORD_S,
    MIN_WORD_S,
    WITH_THE_NEXT_WORD,
    WITH_THE_WORD_BEFORE,
    AlignedWord,
    WordGroup,
    aligned_words,
    edges_by_letters,
    group_words,
    leave_out_pauses,
    words_until,
)
from tests.support.checkpoints import pocket_directory
from tests.support.tokens import TOKENIZER, make_tokenizer, spell, t, words

Times = tuple[float, float]
WORDS = DecodingOptions(word_timestamps=True, language="en")


def word(start_s: float, end_s: float, *onsets_s: float) -> AlignedWord:
    return AlignedWord(" word", start_s, end_s, onsets_s[0], onsets_s[-1])


def timed(words: list[AlignedWord], pauses_s: list[tuple[float, float]], end_s: float) -> list[Times]:
    return [(each.start_s, each.end_s) for each in leave_out_pauses(words, pauses_s, end_s)]


def test_the_pause_between_two_words_belongs_to_neither() -> None:
    pauses_s = [(0.0, 0.3), (0.8, 1.0), (1.4, 2.0)]
    assert timed([word(0, 0.9, 0.4), word(0.9, 1.5, 1.1)], pauses_s, 2.0) == [(0.3, 0.8), (1.0, 1.4)]


def test_a_word_begins_behind_a_click_that_it_does_not_attend_to() -> None:
    """The alignment gives all that comes before the first word to it."""
    assert timed([word(0, 2.0, 1.7)], [(0.05, 1.5)], 2.0) == [(1.5, 2.0)]
    assert timed([word(0.95, 1.3, 0.95)], [(0, 0.8), (0.85, 0.9)], 1.3) == [(0.9, 1.3)]
    assert timed([word(0, 2.0, 0.03)], [(0.05, 0.4)], 2.0) == [(0, 0.05)], "it attends to what comes before"


def test_a_closure_within_a_word_does_not_cut_off_what_comes_before() -> None:
    assert timed([word(0, 0.9, 0.6)], [(0.22, 0.26)], 0.9) == [(0, 0.9)]
    assert timed([word(0, 7.5, 7.2)], [(0.22, 0.26), (2.1, 2.14), (6.85, 7.0)], 7.5) == [(7.0, 7.5)], "noise"


def test_no_word_lasts_through_a_long_pause() -> None:
    assert timed([word(0, 2.9, 0.2), word(2.9, 3.3, 3.0)], [(0.4, 2.4)], 3.3)[0] == (0, 0.4)
    assert timed([word(0, 2.7, 2.2)], [(0.2, 2.5)], 2.7) == [(2.5, 2.7)], "its onset is before the sound"
    assert timed([word(0, 2.7, 0.6)], [(0.2, 2.5)], 2.7) == [(0, 0.2)], "and behind it"


def test_a_word_goes_on_to_the_pause_where_the_alignment_has_moved_on_early() -> None:
    punctuated = [word(0, 0.5, 0.2), word(1.4, 2.0, 1.7)]  # between them a full stop, which is no word
    assert timed(punctuated, [(0.8, 1.5)], 2.0) == [(0, 0.8), (1.5, 2.0)]
    assert timed(punctuated, [(1.1, 1.5)], 2.0)[0] == (0, 0.5), "too far away to be its own sound"
    assert timed(punctuated, [(0.6, 0.65), (0.8, 1.5)], 2.0)[0] == (0, 0.8), "the closure of a consonant"
    assert timed([word(0, 0.5, 0.2)], [(0.7, 0.85)], 0.85) == [(0, 0.7)], "the last one"


def test_a_short_sound_keeps_its_word() -> None:
    assert timed([word(0, 1.7, 0.03), word(1.7, 2.0, 1.9)], [(0.1, 1.5)], 2.0)[0] == (0, 0.1)
    released = [(0.2, 0.28), (0.32, 1.5)]  # the closure and the release of a last consonant
    assert timed([word(0, 0.4, 0.1), word(0.4, 1.9, 1.7)], released, 2.0)[0] == (0, 0.32)


def test_a_word_is_the_short_sound_beside_speech_that_the_text_leaves_out() -> None:
    """Such as a sentence in another language, between a pause and the sentence that the text has."""
    before, behind = [(0.0, 0.7), (4.0, 4.6)], [(1.2, 1.8), (5.4, 6.0)]
    assert timed([word(0.7, 4.8, 0.75), word(4.8, 5.2, 5.0)], before, 5.2)[0] == (4.6, 4.8)
    assert timed([word(0.7, 6.2, 0.9), word(6.2, 6.5, 6.3)], behind, 6.5)[0] == (0.7, 1.2)


def test_no_word_lasts_longer_than_two_seconds() -> None:
    assert timed([word(0, 4.0, 3.0)], [], 4.0) == [(2.0, 4.0)]
    assert timed([word(0, 4.0, 0.5)], [], 4.0) == [(0, 1.5)]
    assert timed([word(0, 5.0, 0.5, 4.5)], [], 5.0) == [(0, 2.0)]


def test_words_in_a_pause_share_the_sound_behind_it() -> None:
    aligned = [word(0, 1.1, 0.2), word(1.1, 1.5, 1.3), word(1.5, 3.0, 2.7), word(3.0, 3.4, 3.2)]
    found = timed(aligned, [(0.6, 2.6)], 3.4)
    assert found[0] == (0, 0.6)
    assert found[1:3] == [pytest.approx((2.6, 2.8)), pytest.approx((2.8, 3.0))]


def begun(times_s: Sequence[float], onsets_s: Sequence[float]) -> list[Times]:
    groups = [WordGroup(" one", number, number + 1) for number in range(len(onsets_s))]
    return [(each.start_s, each.end_s) for each in aligned_words(groups, times_s, onsets_s)]


def test_words_that_run_on_meet_at_the_onset_of_the_second() -> None:
    assert begun((0.0, 0.5, 0.9), (0.3, 0.6)) == [(0.0, 0.6), (0.6, 0.9)]
    assert begun((0.0, 1.9, 2.3), (1.0, 2.0))[0][0] == 1.0, "behind a second of noise"
    assert begun((), ()) == []


def test_words_keep_their_order_and_some_length_whatever_the_onsets() -> None:
    found = begun((0.0, 0.2, 0.4, 0.6, 0.8), (0.3, 0.95, 0.2, 0.9))
    assert found == [pytest.approx(x) for x in ((0.0, 0.74), (0.74, 0.76), (0.76, 0.78), (0.78, 0.8))]
    assert begun((0.0, 0.0, 0.0, 0.02), (0.01, 0.01, 0.01))[-1] == (0.02, 0.02), "more words than positions"


def test_pauses_between_the_onsets_part_two_words() -> None:
    two = [word(0.0, 0.93, 0.3), word(0.93, 1.2, 1.0)]
    assert timed(two, [(0.4, 0.55), (0.6, 0.8)], 1.2) == [(0.0, 0.4), (0.8, 1.2)]
    assert timed(two, [(0.8, 0.96)], 1.2) == [(0.0, 0.8), (0.96, 1.2)], "behind the usual start"
    assert timed(two, [(0.9, 0.95)], 1.2) == [(0.0, 0.9), (0.95, 1.2)], "short, where they meet"
    assert timed(two, [(0.6, 0.69)], 1.2) == [(0.0, 0.93), (0.93, 1.2)], "the closure of a consonant"
    assert timed(two, [(1.04, 1.16)], 1.2) == [(0.0, 0.93), (0.93, 1.04)], "behind the second"
    assert timed([word(0.0, 0.5, 0.3), word(1.6, 1.9, 1.8)], [(1.1, 1.3)], 1.9) == [(0.0, 0.5), (1.3, 1.9)]


def test_words_share_a_time_by_their_letters() -> None:
    assert edges_by_letters([" a", " bcd", " "], 1.0, 3.5) == [(1.0, 1.5), (1.5, 3.0), (3.0, 3.5)]
    assert edges_by_letters([], 1.0, 2.0) == []


def test_the_last_words_end_where_it_is_read_again() -> None:
    said = [Word(" a", 0.5, 1.0), Word(" b", 1.0, 2.0)]
    assert words_until(said, 3.0) == tuple(said)
    assert words_until(said, 1.5) == (said[0], Word(" b", 1.0, 1.5))
    assert words_until(said, 0.75) == (
        Word(" a", 0.5, 0.75 - MIN_WORD_S),
        Word(" b", 0.75 - MIN_WORD_S, 0.75),
    )
    assert words_until(said[:1], 0.01) == (Word(" a", 0.0, 0.01),)


def test_without_a_pause_the_alignment_holds() -> None:
    assert timed([word(0.1, 0.6, 0.4), word(0.6, 0.9, 0.7)], [], 1.0) == [(0.1, 0.6), (0.6, 0.9)]


def test_a_word_in_silence_keeps_its_time() -> None:
    assert timed([word(0.1, 0.6, 0.4)], [(0.0, 1.0)], 1.0) == [(0.1, 0.6)]


@pytest.mark.parametrize("seed", range(20))
def test_no_word_is_without_length_and_no_time_runs_backwards(seed: int) -> None:
    random = np.random.default_rng(seed)
    edges = np.cumsum(random.integers(1, 40, 30)) * 0.02
    aligned = [
        word(start_s, end_s, *np.sort(random.uniform(start_s, end_s, 2)).tolist())
        for start_s, end_s in pairwise(edges.tolist())
    ]
    places = np.sort(random.uniform(0, edges[-1], 40)).reshape(-1, 2)
    found = timed(aligned, [(a, b) for a, b in places.tolist() if b - a >= 0.03], float(edges[-1]))
    assert all(end_s - start_s >= MIN_WORD_S - 1e-9 for start_s, end_s in found)
    assert all(end_s - start_s <= MAX_WORD_S + 1e-9 for start_s, end_s in found)
    assert all(before[1] <= after[0] for before, after in pairwise(found))


def heard(
    *tokens: int,
    times_s: Sequence[float],
    onsets_s: Sequence[float],
    pauses_s: Sequence[Times] = (),
    language: str = "en",
) -> ChunkResult:
    return ChunkResult(
        tokens=tokens,
        logprobs=(0.0,) * len(tokens),
        avg_logprob=-0.1,
        no_speech_prob=0.0,
        compression_ratio=1.0,
        temperature=0.0,
        language=language,
        finish_reason="stop",
        token_times_s=tuple(times_s),
        token_onsets_s=tuple(onsets_s),
        token_focus=(0.5,) * len(onsets_s),
        pauses_s=tuple(pauses_s),
    )


def sound(duration_s: float) -> Samples:
    return np.random.default_rng(0).normal(0, 0.1, round(duration_s * SAMPLE_RATE)).astype(np.float32)


def segments(result: ChunkResult, samples: Samples, start_s: float = 0.0) -> list[Segment]:
    part = decode_part(Chunk(0, round(start_s * SAMPLE_RATE), samples), result, WORDS, TOKENIZER)
    return segments_of(part, TOKENIZER)


def test_words_lie_in_their_segments_on_the_files_clock() -> None:
    result = heard(
        *(t(0), *words("12"), t(2), t(2), *words("3"), *spell("!"), t(4)),
        times_s=(0.2, 1.0, 2.0, 3.0, 3.5),
        onsets_s=(0.5, 1.5, 2.5, 3.2),
    )
    first, second = segments(result, sound(4), start_s=60)
    one, two, three = [*first.words, *second.words]
    assert [(w.text, w.start_s, w.end_s) for w in (one, two, three)] == [
        (" one", 60.2, 61.5),
        (" two", one.end_s, 62.5),
        (" three!", two.end_s, 63.5),
    ]


def test_what_is_read_ends_where_the_unread_tail_begins() -> None:
    result = heard(
        *(t(0), *words("1"), t(2.6), t(4), *words("2")),
        times_s=(0.8, 2.4),  # of the tail's text there are none
        onsets_s=(1.0,),
        pauses_s=((2.55, 2.8), (7.0, 9.0)),
    )
    (segment,) = segments(result, sound(10))
    assert [(w.text, w.start_s, w.end_s) for w in segment.words] == [(" one", 0.8, 2.55)]


def test_a_language_without_spaces_has_a_word_for_each_character() -> None:
    tokens = spell("你好")
    result = heard(
        *(t(0), *tokens, t(2)),
        times_s=tuple(0.2 * i for i in range(7)),
        onsets_s=tuple(0.2 * i + 0.1 for i in range(6)),
        language="zh",
    )
    (segment,) = segments(result, sound(2))
    assert [w.text for w in segment.words] == ["你", "好"]


TEXTS = {
    "en": ' She said: "It isn\'t 3,000 dollars (or so)", and left... "Really?" asked-he.',
    "de": " Grüß Gott! Straßenbahn-Haltestelle „Süd“ – 12.30 Uhr.",
    "fr": " L'été, c'est « déjà » fini ¿no?",
    "zh": "你好，世界！今天天气很好。「是吗？」",
    "ja": " これはテストです。ＯＫ？ 𠮷野家。",
    "ru": " Привет, мир! Ещё раз — да.",
}


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    return Tokenizer.from_directory(pocket_directory())


def theirs(tokens: list[int], language: str) -> list[str]:
    tokenizer: Any = get_tokenizer(True, language=language)
    texts, groups = tokenizer.split_to_word_tokens([*tokens, tokenizer.eot])
    timings = [WordTiming(t, g, 0, 0, 0) for t, g in zip(texts[:-1], groups[:-1], strict=True)]
    merge_punctuations(timings, WITH_THE_NEXT_WORD, WITH_THE_WORD_BEFORE)
    return [timing.word for timing in timings if timing.word]


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # it leaves its vocabulary file to the garbage collector
@pytest.mark.parametrize("language", list(TEXTS))
def test_words_are_openai_whispers(multilingual: Tokenizer, language: str) -> None:
    tokens = multilingual.encode(TEXTS[language])
    groups = group_words(tokens, multilingual, spaced=language not in ("zh", "ja"))
    assert [group.text for group in groups] == theirs(tokens, language)
    assert "".join(group.text for group in groups) == TEXTS[language]
    assert len(groups) > 3


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_any_text_is_grouped_as_by_openai_whisper(multilingual: Tokenizer, language: str) -> None:
    """Random tokens that make whole characters, alone or, as of emoji, several together."""
    random = Random(4)
    whole = [token for token in range(50_257) if "\ufffd" not in multilingual.decode([token])]
    parts = [[token] for token in whole] + [multilingual.encode(character) for character in "🎉𠮷龘ꙮ"] * 5000
    for _ in range(60):
        tokens = [token for part in random.choices(parts, k=20) for token in part]
        ours = [group.text for group in group_words(tokens, multilingual, spaced=language == "en")]
        assert ours == theirs(tokens, language)


def test_bytes_that_make_no_character_hold_up_nothing() -> None:
    tokens = [*words("1"), *b"\xff\xe4", *words("2"), *words("3")]
    groups = group_words(tokens, make_tokenizer(), spaced=True)
    assert [(group.first, group.end) for group in groups] == [(0, 4), (4, 5)]
