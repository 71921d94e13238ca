"""Keywords in the tokens that the published models have."""

from __future__ import annotations

import pytest

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.engine.boost import keyword_boost
from tests.support.real_weights import real_checkpoint
from tests.unit.engine.test_boost import states, total


@pytest.mark.parametrize("text", ["Kubernetes", "kubernetes", "a Kubernetes", "a kubernetes", "(Kubernetes"])
def test_of_published_tokens_every_case_and_place_of_a_keyword_is_matched(text: str) -> None:
    tokenizer = Tokenizer.from_directory(real_checkpoint("base"))
    boost = keyword_boost(tokenizer, ("Kubernetes", "Ada Lovelace"))
    at = states(boost, tokenizer.encode(text))
    assert boost.potential(at[-1]) == 0
    assert total(boost, tokenizer.encode(text)) > 0


def test_of_published_tokens_a_keyword_begun_with_a_shorter_token_is_matched() -> None:
    tokenizer = Tokenizer.from_directory(real_checkpoint("base"))
    boost = keyword_boost(tokenizer, ("Grafana",))
    split = [*tokenizer.encode(" Gr"), *tokenizer.encode("afana")]
    assert split != tokenizer.encode(" Grafana")
    assert boost.potential(states(boost, split)[-1]) == 0
    assert total(boost, split) > 0
