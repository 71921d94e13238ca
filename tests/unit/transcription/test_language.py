import asyncio
import math
from functools import cache

import numpy as np
import pytest
import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import DecodingOptions
from asr_server.transcription.language import CONFIDENT, MAX_VOTES, LanguageDetector, likeliest
from harness.clips import make_clip
from harness.engine_helpers import Reference
from tests.support.checkpoints import short_window_directory
from tests.unit.transcription.pipeline import chunks_of, transcribe


def test_the_likeliest_is_taken_among_the_candidates_only() -> None:
    probabilities = {"en": 0.7, "de": 0.2, "fr": 0.1}
    assert likeliest(probabilities, ()) == "en"
    assert likeliest(probabilities, ("fr", "de")) == "de"


async def waiting(detector: LanguageDetector) -> asyncio.Task[str | None]:
    task = asyncio.create_task(detector.next_language())
    await asyncio.sleep(0)
    return task


async def test_the_others_wait_until_a_confident_choice_and_carry_it() -> None:
    detector = LanguageDetector(None)
    assert await detector.next_language() is None
    second, third = await waiting(detector), await waiting(detector)
    assert not second.done()
    assert detector.on_probabilities({"en": 0.1, "de": 0.9}) == "de"
    assert [await second, await third] == ["de", "de"]


async def test_a_doubtful_choice_is_not_settled_before_the_chunk_is_read() -> None:
    detector = LanguageDetector(None)
    await detector.next_language()
    second = await waiting(detector)
    assert detector.on_probabilities({"en": 0.4, "de": 0.3, "fr": 0.3}) == "en"
    await asyncio.sleep(0)
    assert not second.done()
    detector.on_decoded("en")
    assert await second is None, "it votes too"


async def test_the_votes_of_several_doubtful_chunks_are_summed_as_logarithms() -> None:
    detector = LanguageDetector(None)
    for probabilities in ({"en": 0.45, "de": 0.4, "fr": 0.15}, {"en": 0.1, "de": 0.75, "fr": 0.15}):
        assert await detector.next_language() is None
        detector.on_probabilities(probabilities)
        detector.on_decoded(detector.guess)
    assert (detector.guess, detector.code) == ("de", "de")
    assert detector.probability == pytest.approx(0.4 * 0.75 / (0.4 * 0.75 + 0.45 * 0.1 + 0.15 * 0.15))
    assert await detector.conclusion() == "de"


async def test_the_votes_are_bounded() -> None:
    detector = LanguageDetector(None)
    for _ in range(4):
        assert await detector.next_language() is None
        detector.on_probabilities({"en": 0.34, "de": 0.33, "fr": 0.33})
        detector.on_decoded("en")
    assert await detector.next_language() == "en"


async def test_a_file_that_ends_in_doubt_is_what_most_speaks_for() -> None:
    detector = LanguageDetector(None)
    await detector.next_language()
    detector.on_probabilities({"en": 0.4, "de": 0.6})
    detector.on_all_sent()
    assert detector.code is None, "its only chunk may hold no speech"
    detector.on_decoded("de")
    assert await detector.conclusion() == "de"
    assert detector.probability == pytest.approx(0.6)


async def test_a_file_without_speech_has_no_language() -> None:
    detector = LanguageDetector(None)
    await detector.next_language()
    detector.on_probabilities({"en": 0.4, "de": 0.6})
    detector.on_decoded(None)
    detector.on_all_sent()
    assert detector.code is None


async def test_after_a_chunk_without_speech_the_next_one_detects_and_the_rest_wait_on() -> None:
    detector = LanguageDetector(None)
    await detector.next_language()
    second, third = await waiting(detector), await waiting(detector)
    detector.on_probabilities({"en": 0.4, "de": 0.3, "fr": 0.3})
    detector.on_decoded(None)
    assert await second is None
    assert not third.done()
    detector.on_probabilities({"fr": 0.99, "en": 0.01})
    assert await third == "fr"


async def test_confidence_is_measured_among_the_candidates() -> None:
    detector = LanguageDetector(None, ("de", "fr"))
    await detector.next_language()
    assert detector.on_probabilities({"en": 0.9, "de": 0.08, "fr": 0.02}) == "de"
    assert detector.code == "de"


async def test_a_late_conclusion_does_not_take_a_confident_choice_back() -> None:
    detector = LanguageDetector(None)
    await detector.next_language()
    detector.on_probabilities({"en": 0.9, "de": 0.1})
    detector.on_decoded(None)
    assert detector.code == "en"


def test_a_model_that_gives_no_language_any_probability_names_one() -> None:
    assert LanguageDetector(None).on_probabilities({"en": 0.0, "de": 0.0}) == "en"


WINDOW_S = 8
SOUND = make_clip(11, 5.5 * WINDOW_S)


@cache
def probabilities_by_transformers() -> list[dict[str, float]]:
    """Of each chunk's languages."""
    directory = short_window_directory()
    reference, specials = Reference(directory), Tokenizer.from_directory(directory).specials
    samples = [chunk.samples for chunk in chunks_of(directory, SOUND)]
    start = torch.full((len(samples), 1), specials.start_of_transcript)
    with torch.inference_mode():
        logits = reference.model(reference.features(samples), decoder_input_ids=start).logits[:, -1]
    codes = list(specials.languages)
    rows = logits[:, [specials.languages[code] for code in codes]].softmax(-1)
    return [dict(zip(codes, row, strict=True)) for row in rows.tolist()]


def voted(candidates: tuple[str, ...]) -> tuple[str, float]:
    """The language of the first chunks' summed log-probabilities among the candidates, and its share."""
    rows = probabilities_by_transformers()
    codes = [code for code in rows[0] if not candidates or code in candidates]
    sums = np.zeros(len(codes))
    for row in rows[:MAX_VOTES]:
        weights = np.array([row[code] for code in codes])
        sums += np.log(np.maximum(weights / weights.sum(), 1e-6))
        shares = np.exp(sums - sums.max())
        shares /= shares.sum()
        if shares.max() >= CONFIDENT:
            break
    return codes[int(shares.argmax())], float(shares.max())


@pytest.mark.parametrize("candidates", [pytest.param((), marks=pytest.mark.trial), ("de", "fr", "ja", "ru")])
def test_the_chunks_of_a_file_vote(candidates: tuple[str, ...]) -> None:
    options = DecodingOptions(candidate_languages=candidates, max_new_tokens=6)
    transcript = asyncio.run(transcribe(short_window_directory(), SOUND, options))
    code, share = voted(candidates)
    assert transcript.languages == (code,)
    assert transcript.language_probability is not None
    assert math.isclose(transcript.language_probability, share, abs_tol=1e-3)


def test_each_chunk_of_a_mixed_recording_has_its_own() -> None:
    options = DecodingOptions(multilingual=True, max_new_tokens=6)
    transcript = asyncio.run(transcribe(short_window_directory(), SOUND, options))
    own = [max(row, key=row.__getitem__) for row in probabilities_by_transformers()]
    assert len(set(own)) > 1, "the audio must matter"
    assert transcript.languages == tuple(dict.fromkeys(own))
