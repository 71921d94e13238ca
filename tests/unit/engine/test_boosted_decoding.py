"""Keywords in the engine: they win where the model is in doubt, change nobody else, and leave its figures."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.engine import boost
from harness.engine_helpers import Checkpoint, transcribe
from tests.support.real_weights import hugging_face_checkpoint
from tests.unit.engine.test_beam import WIDTH, results_of_mixed
from tests.unit.engine.test_engine import CLIPS, MIXED

KEYWORDS = ("Szymborska", "Llandudno", "Okonkwo", "Ada Lovelace", "one two three")  # of several tokens
# And of one: behind a word random weights write a timestamp, so that they complete no other.
BRIEF_KEYWORDS = (*KEYWORDS, "Monday", "water", "street")


# -- In the engine ----------------------------------------------------------------------------------------


@pytest.fixture
def strong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bonuses by which random weights write keywords."""
    boost.keyword_boost.cache_clear()
    monkeypatch.setattr(boost, "FIRST_BONUS", 20.0)
    monkeypatch.setattr(boost, "NEXT_BONUS", 20.0)
    yield
    boost.keyword_boost.cache_clear()


BOOSTED = [
    msgspec.structs.replace(options, keywords=BRIEF_KEYWORDS if number % 2 else ())
    for number, options in enumerate(MIXED)
]


def tokens_of(found: list[ChunkResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in found]


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
@pytest.mark.parametrize(
    ("beam_size", "lookahead"), [pytest.param(1, True, marks=pytest.mark.trial), (WIDTH, False)]
)
def test_keywords_change_their_own_text_alone_and_the_same_in_any_company(
    pocket: Checkpoint, beam_size: int, lookahead: bool
) -> None:
    engines = [pocket.engine(num_slots=1, beam_size=beam_size) for _ in CLIPS]
    alone = [transcribe(*each)[0] for each in zip(engines, [[c] for c in CLIPS], BOOSTED, strict=True)]
    plain = results_of_mixed(pocket.engine(beam_size=beam_size), MIXED)
    assert tokens_of(alone)[::2] == tokens_of(plain)[::2]
    assert tokens_of(alone)[1::2] != tokens_of(plain)[1::2]
    assert all(logprob <= 0 for result in alone for logprob in result.logprobs)
    found = results_of_mixed(pocket.engine(num_slots=3, beam_size=beam_size, lookahead=lookahead), BOOSTED)
    assert tokens_of(found) == tokens_of(alone)
    averages = [result.avg_logprob for result in alone]
    assert [result.avg_logprob for result in found] == pytest.approx(averages, abs=1e-4)


def test_a_retry_at_a_temperature_has_no_bonus(pocket: Checkpoint) -> None:
    options = DecodingOptions(language="de", max_new_tokens=8, temperatures=(0.6,), seed=5)
    boosted = msgspec.structs.replace(options, keywords=KEYWORDS)
    found, plain = (transcribe(pocket.engine(), CLIPS[:2], each) for each in (boosted, options))
    assert tokens_of(found) == tokens_of(plain)


@pytest.mark.trial
@pytest.mark.parametrize("beam_size", [1, WIDTH])
def test_whisper_base_writes_a_rare_name_as_its_keyword_spells_it(beam_size: int) -> None:
    from harness.speech.synthesis import is_installed
    from harness.speech.synthesis import say as say_text

    if not is_installed():
        pytest.skip("the voice that reads aloud is not installed")
    checkpoint = Checkpoint.load(hugging_face_checkpoint("base"))
    spoken = [
        say_text(f"Please write to {name} before the end of the week.")
        for name in ("Castellano", "Quillfeather")
    ]
    options = DecodingOptions(language="en")
    boosted = msgspec.structs.replace(options, keywords=("Castellano", "Quillfeather"))
    engine = checkpoint.engine(beam_size=beam_size, short_audio="tail")
    plain, found = (
        " ".join(checkpoint.tokenizer.decode(each.tokens) for each in transcribe(engine, spoken, own))
        for own in (options, boosted)
    )
    assert "Castellano" not in plain
    assert "Quillfeather" not in plain
    assert "Castellano" in found
    assert "Quillfeather" in found
