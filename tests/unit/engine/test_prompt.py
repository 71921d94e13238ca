"""The tokens before a chunk's text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import DecodingOptions
from asr_server.engine.prompt import prompt_of, sot_sequence

START, BEFORE, ENGLISH, TRANSCRIBE, TRANSLATE = 61, 62, 67, 65, 66
SPECIALS = SpecialTokens(
    end_of_text=60,
    start_of_transcript=START,
    start_of_prev=BEFORE,
    no_speech=64,
    no_timestamps=69,
    timestamp_begin=70,
    transcribe=TRANSCRIBE,
    translate=TRANSLATE,
    languages={"en": ENGLISH},
    is_multilingual=True,
)
WHAT_IS_SAID, IN_ENGLISH = DecodingOptions(), DecodingOptions(task="translate")


def previous_text(options: DecodingOptions, specials: SpecialTokens, num_positions: int) -> list[int]:
    prompt, sot_index = prompt_of(options, "en", specials, num_positions)
    return prompt[:sot_index]


def test_the_text_so_far_takes_at_most_half_the_positions_less_one() -> None:
    ten = DecodingOptions(prompt_tokens=tuple(range(10)))
    assert previous_text(ten, SPECIALS, 8) == [BEFORE, 7, 8, 9]
    assert previous_text(ten, SPECIALS, 448) == [BEFORE, *range(10)]
    assert previous_text(WHAT_IS_SAID, SPECIALS, 448) == []
    assert previous_text(ten, replace(SPECIALS, start_of_prev=None), 448) == []


@pytest.mark.parametrize(
    ("options", "language", "specials", "tokens"),
    [
        (WHAT_IS_SAID, "en", SPECIALS, [START, ENGLISH, TRANSCRIBE]),
        (IN_ENGLISH, "en", SPECIALS, [START, ENGLISH, TRANSLATE]),
        (WHAT_IS_SAID, None, SPECIALS, [START, TRANSCRIBE]),
        (WHAT_IS_SAID, "en", replace(SPECIALS, transcribe=None), [START, ENGLISH]),
        (WHAT_IS_SAID, "en", replace(SPECIALS, is_multilingual=False), [START]),
    ],
)
def test_language_and_task_follow_where_the_checkpoint_has_tokens_for_them(
    options: DecodingOptions, language: str | None, specials: SpecialTokens, tokens: list[int]
) -> None:
    assert sot_sequence(options, language, specials) == tokens


@pytest.mark.parametrize(
    "specials", [replace(SPECIALS, translate=None), replace(SPECIALS, is_multilingual=False)]
)
def test_a_checkpoint_that_cannot_translate_says_so(specials: SpecialTokens) -> None:
    with pytest.raises(ValueError, match="cannot translate"):
        sot_sequence(IN_ENGLISH, "en", specials)
