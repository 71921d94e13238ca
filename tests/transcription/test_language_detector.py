import asyncio

from asr_server.transcription.language_detector import LanguageDetector


async def waiting(detector: LanguageDetector) -> asyncio.Task[str | None]:
    task = asyncio.create_task(detector.next_language())
    await asyncio.sleep(0)
    return task


async def test_a_given_language_needs_no_detection() -> None:
    assert await LanguageDetector("de").next_language() == "de"


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
    assert await second == "en"


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
