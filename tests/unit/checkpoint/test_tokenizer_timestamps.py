from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from asr_server.checkpoint.tokenizer import Timestamps
from asr_server.core import ChunkResult, DecodingOptions
from tests.support.tokens import TOKENIZER, t, words

TIMED = DecodingOptions()
TAIL = (t(0), *words("1"), t(2), t(2.5), *words("23"))


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
    border = t(closed_s)
    return result(t(0), *words("1"), border, border, *words("2"), *behind)


def test_where_no_text_is_closed_all_is_read() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    for tokens in ((), words("12"), (t(1),), (t(0), *words("12"))):
        assert times.tail(result(*tokens), TIMED) == (len(tokens), None)


def test_a_text_that_ends_with_a_time_is_whole_unless_it_was_cut_off_there() -> None:
    times, end = Timestamps(TOKENIZER, 6.0), t(3)
    tokens = one_and_two(1.0, end).tokens
    assert times.tail(result(*tokens), TIMED) == (len(tokens), None)
    assert times.tail(result(*tokens, finish_reason="length"), TIMED) == (len(tokens), 3.0)
    begun = (*tokens, end)  # the next text begins there, and nothing of it was read
    assert times.tail(result(*begun), TIMED) == (len(tokens), 3.0)
    assert times.tail(result(*begun, finish_reason="length"), TIMED) == (len(tokens), 3.0)


def test_a_border_is_two_times_in_a_row() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    assert times.borders(TAIL) == [3]
    assert times.borders((t(0), t(0), *words("1"))) == [1]
    assert times.borders((t(0), *words("1"), t(1), *words("2"))) == []
    assert times.is_time(t(0))
    assert not times.is_time(t(0) - 1)
