from __future__ import annotations

import numpy as np

from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Samples, Segment
from asr_server.transcription import assembly
from asr_server.transcription.word_times import AlignedWord, leave_out_pauses, words_within
from tests.vocabulary import at, make_tokenizer, spell, words

TOKENIZER = make_tokenizer()
WORDS = DecodingOptions(timestamps=True, word_timestamps=True, language="en")


def word(start_s: float, end_s: float, *peaks_s: float) -> AlignedWord:
    return AlignedWord(" word", start_s, end_s, peaks_s[0], peaks_s[-1])


def times(aligned: list[AlignedWord]) -> list[tuple[float, float]]:
    return [(each.start_s, each.end_s) for each in aligned]


def test_the_longest_pause_between_two_words_belongs_to_neither() -> None:
    pauses_s = [(0.0, 0.3), (0.5, 0.54), (0.8, 1.0), (1.2, 1.25), (1.4, 2.0)]
    settled = leave_out_pauses([word(0, 0.6, 0.4), word(0.6, 2, 1.1)], pauses_s, 2.0)
    assert times(settled) == [(0.3, 0.8), (1.0, 1.4)]


def test_without_a_pause_the_alignment_holds() -> None:
    aligned = [word(0.1, 0.6, 0.4), word(0.6, 0.9, 0.7)]
    assert leave_out_pauses(aligned, [], 1.0) == aligned
    assert leave_out_pauses(aligned, [(0.5, 0.52)], 1.0) == aligned


def test_peaks_out_of_order_move_nothing() -> None:
    aligned = [word(0.1, 0.6, 0.9), word(0.6, 0.9, 0.3)]
    settled = leave_out_pauses(aligned, [(0.4, 0.8)], 1.0)
    assert (settled[0].end_s, settled[1].start_s) == (0.6, 0.6)


def test_words_keep_to_their_segment() -> None:
    far = [word(0.0, 2.2, 2.1), word(2.2, 9.0, 2.5)]
    assert [(w.start_s, w.end_s) for w in words_within(far, 2.0, 3.0)] == [(2.0, 2.2), (2.2, 3.0)]
    near = [word(1.6, 2.2, 2.1), word(2.2, 3.4, 2.5)]
    assert [(w.start_s, w.end_s) for w in words_within(near, 2.0, 3.0)] == [(1.6, 2.2), (2.2, 3.4)]


def test_no_time_runs_backwards() -> None:
    made = words_within([word(1, 2, 1), word(1.5, 1.2, 1), word(0, 3, 1)], 1.0, 3.0)
    assert [(w.start_s, w.end_s) for w in made] == [(1, 2), (2, 2), (2, 3)]


def heard(
    *tokens: int,
    times_s: tuple[float, ...],
    peaks_s: tuple[float, ...],
    pauses_s: tuple[tuple[float, float], ...] = (),
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
        token_times_s=times_s,
        token_peaks_s=peaks_s,
        pauses_s=pauses_s,
    )


def sound(duration_s: float) -> Samples:
    return np.random.default_rng(0).normal(0, 0.1, round(duration_s * SAMPLE_RATE)).astype(np.float32)


def segments(result: ChunkResult, samples: Samples, start_s: float = 0.0) -> list[Segment]:
    part = assembly.decode_part(Chunk(0, round(start_s * SAMPLE_RATE), samples), result, WORDS, TOKENIZER)
    return assembly.segments(part, TOKENIZER)


def t(time_s: float) -> int:
    return at(TOKENIZER, time_s)


def test_words_lie_in_their_segments_on_the_files_clock() -> None:
    result = heard(
        *(t(0), *words("12"), t(2), t(2), *words("3"), *spell("!"), t(4)),
        times_s=(0.2, 1.0, 2.0, 3.0, 3.5),
        peaks_s=(0.5, 1.5, 2.5, 3.2),
    )
    first, second = segments(result, sound(4), start_s=60)
    assert [(w.text, w.start_s, w.end_s) for w in first.words] == [(" one", 60.2, 61.0), (" two", 61.0, 62.0)]
    assert [(w.text, w.start_s, w.end_s) for w in second.words] == [(" three!", 62.0, 63.0)]


def test_a_pause_behind_the_last_word_read_is_not_looked_for_in_the_unread_tail() -> None:
    result = heard(
        *(t(0), *words("1"), t(2.6), t(4), *words("2")),
        times_s=(0.0, 3.0, 6.0),
        peaks_s=(1.0, 5.0),
        pauses_s=((2.5, 2.8), (7.0, 9.0)),  # the second one is after the word that is unread
    )
    (segment,) = segments(result, sound(10))
    assert segment.words[0].end_s == 2.5


def test_a_language_without_spaces_has_a_word_for_each_character() -> None:
    tokens = spell("你好")
    result = heard(
        *(t(0), *tokens, t(2)),
        times_s=tuple(0.2 * i for i in range(7)),
        peaks_s=tuple(0.2 * i + 0.1 for i in range(6)),
        language="zh",
    )
    (segment,) = segments(result, sound(2))
    assert [w.text for w in segment.words] == ["你", "好"]
