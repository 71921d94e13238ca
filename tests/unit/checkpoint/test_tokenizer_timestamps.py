from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from asr_server.checkpoint.tokenizer import Timestamps
from asr_server.core import ChunkResult, DecodingOptions
from tests.support.tokens import at, make_tokenizer, words

TOKENIZER = make_tokenizer()
TIMED = DecodingOptions()
TAIL = (at(TOKENIZER, 0), *words("1"), at(TOKENIZER, 2), at(TOKENIZER, 2.5), *words("23"))


def result(*tokens: int, finish_reason: Literal["stop", "length"] = "stop") -> ChunkResult:
    return ChunkResult(tokens, (0.0,) * len(tokens), -0.1, 0.0, 1.0, 0.0, "en", finish_reason)


def test_the_text_behind_the_last_closed_time_is_unread() -> None:
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), TIMED) == (3, 2.0)


@pytest.mark.parametrize("change", [{"max_new_tokens": 9}, {"is_last_part": True}])
def test_where_nothing_can_be_read_again_all_is_read(change: dict[str, bool | int]) -> None:
    options = msgspec.structs.replace(TIMED, **change)
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), options) == (len(TAIL), None)


def one_and_two(closed_s: float, *behind: int) -> ChunkResult:
    """ "one" up to a time, "two" from there on, and more behind it."""
    border = at(TOKENIZER, closed_s)
    return result(at(TOKENIZER, 0), *words("1"), border, border, *words("2"), *behind)


def test_where_no_text_is_closed_all_is_read() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    for tokens in ((), words("12"), (at(TOKENIZER, 1),), (at(TOKENIZER, 0), *words("12"))):
        assert times.tail(result(*tokens), TIMED) == (len(tokens), None)


def test_a_text_that_ends_with_a_time_is_whole_unless_it_was_cut_off_there() -> None:
    times, end = Timestamps(TOKENIZER, 6.0), at(TOKENIZER, 3)
    tokens = one_and_two(1.0, end).tokens
    assert times.tail(result(*tokens), TIMED) == (len(tokens), None)
    assert times.tail(result(*tokens, finish_reason="length"), TIMED) == (len(tokens), 3.0)
    begun = (*tokens, end)  # the next text begins there, and nothing of it was read
    assert times.tail(result(*begun), TIMED) == (len(tokens), 3.0)
    assert times.tail(result(*begun, finish_reason="length"), TIMED) == (len(tokens), 3.0)


def test_a_border_is_two_times_in_a_row() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    assert times.borders(TAIL) == [3]
    assert times.borders((at(TOKENIZER, 0), at(TOKENIZER, 0), *words("1"))) == [1]
    assert times.borders((at(TOKENIZER, 0), *words("1"), at(TOKENIZER, 1), *words("2"))) == []
    assert times.is_time(at(TOKENIZER, 0))
    assert not times.is_time(at(TOKENIZER, 0) - 1)
