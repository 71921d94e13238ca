"""How sure each word is, by its tokens and by those beside it."""

import math

import msgspec
import numpy as np
import pytest

from asr_server.core import Chunk, DecodingOptions, Word
from asr_server.transcription.confidence import FEATURES, TokensOfWord, confidences, evidence_of, model
from asr_server.transcription.segments import decode_part, ending_at
from tests.support.speech import silence
from tests.support.tokens import TOKENIZER, spell
from tests.unit.transcription.parts import timed

OPTIONS = DecodingOptions(language="en", word_timestamps=True)
SURE = TokensOfWord((-0.01, -0.02), (0.7, 0.8))


@pytest.mark.parametrize(
    "other",
    [
        [SURE, TokensOfWord((-0.01, -2.0), (0.7, 0.8)), SURE],
        [SURE, TokensOfWord((-0.01, -0.02), (0.7, 0.1)), SURE],
        [SURE, SURE, TokensOfWord((-3.0,), (0.7,))],
    ],
    ids=["an unlikely token", "attention elsewhere", "an unlikely word beside"],
)
def test_what_makes_a_word_less_sure(other: list[TokensOfWord]) -> None:
    assert 0 < confidences(other)[1] < confidences([SURE, SURE, SURE])[1] < 1


@pytest.mark.parametrize("logprob", [0.0, -1e-9, -30.0, -math.inf])
def test_there_is_finite_evidence_whatever_the_probability(logprob: float) -> None:
    evidence = evidence_of([TokensOfWord((logprob,), (0.0,)), SURE])
    assert evidence.shape == (2, len(FEATURES)) == (2, len(model().weights))
    assert np.isfinite(evidence).all()


def test_timed_words_have_a_confidence_which_stays_when_what_follows_is_read_again() -> None:
    chunk = Chunk(0, 0, silence(3.0))
    result = timed(spell(" one two three"), 0.2, 2.8, 3.0)
    words = decode_part(chunk, result, OPTIONS, TOKENIZER).spans[0].words
    assert all(0 < (word.confidence or 0) < 1 for word in words)
    cut = ending_at(decode_part(chunk, result, OPTIONS, TOKENIZER), 1, 2.7).spans[0].words
    assert [certainty(word) for word in cut] == [certainty(word) for word in words]
    untimed = msgspec.structs.replace(result, token_times_s=(), token_onsets_s=(), token_focus=())
    assert decode_part(chunk, untimed, OPTIONS, TOKENIZER).spans[0].words == ()


def certainty(word: Word) -> tuple[float | None, float | None]:
    return word.probability, word.confidence
