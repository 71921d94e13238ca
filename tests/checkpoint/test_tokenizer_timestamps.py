from __future__ import annotations

import msgspec
import pytest

from asr_server.checkpoint.tokenizer import Timestamps
from asr_server.core import ChunkResult, DecodingOptions
from tests.vocabulary import at, make_tokenizer, words

TOKENIZER = make_tokenizer()
TIMED = DecodingOptions()
TAIL = (at(TOKENIZER, 0), *words("1"), at(TOKENIZER, 2), at(TOKENIZER, 2.5), *words("23"))


def result(*tokens: int) -> ChunkResult:
    return ChunkResult(tokens, (0.0,) * len(tokens), -0.1, 0.0, 1.0, 0.0, "en", "stop")


def test_the_text_behind_the_last_closed_time_is_unread() -> None:
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), TIMED) == (3, 2.0)


@pytest.mark.parametrize("change", [{"max_new_tokens": 9}, {"is_last_part": True}])
def test_where_nothing_can_be_read_again_all_is_read(change: dict[str, bool | int]) -> None:
    options = msgspec.structs.replace(TIMED, **change)
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), options) == (len(TAIL), None)


def test_no_time_lies_behind_the_audio() -> None:
    assert Timestamps(TOKENIZER, 1.5).time_s(at(TOKENIZER, 2)) == 1.5
