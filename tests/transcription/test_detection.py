import asyncio

from asr_server.transcription.detection import Detection


async def waiting(detection: Detection) -> asyncio.Task[str | None]:
    task = asyncio.create_task(detection.turn())
    await asyncio.sleep(0)
    return task


async def test_a_given_language_needs_no_detection() -> None:
    assert await Detection("de").turn() == "de"


async def test_the_others_wait_until_a_confident_choice_and_carry_it() -> None:
    detection = Detection(None)
    assert await detection.turn() is None
    second, third = await waiting(detection), await waiting(detection)
    assert not second.done()
    assert detection.choose({"en": 0.1, "de": 0.9}) == "de"
    assert [await second, await third] == ["de", "de"]


async def test_a_doubtful_choice_is_not_settled_before_the_chunk_is_read() -> None:
    detection = Detection(None)
    await detection.turn()
    second = await waiting(detection)
    assert detection.choose({"en": 0.4, "de": 0.3, "fr": 0.3}) == "en"
    await asyncio.sleep(0)
    assert not second.done()
    detection.conclude("en")
    assert await second == "en"


async def test_after_a_chunk_without_speech_the_next_one_detects_and_the_rest_wait_on() -> None:
    detection = Detection(None)
    await detection.turn()
    second, third = await waiting(detection), await waiting(detection)
    detection.choose({"en": 0.4, "de": 0.3, "fr": 0.3})
    detection.conclude(None)
    assert await second is None
    assert not third.done()
    detection.choose({"fr": 0.99, "en": 0.01})
    assert await third == "fr"


async def test_confidence_is_measured_among_the_candidates() -> None:
    detection = Detection(None, ("de", "fr"))
    await detection.turn()
    assert detection.choose({"en": 0.9, "de": 0.08, "fr": 0.02}) == "de"
    assert detection.code == "de"


async def test_a_late_conclusion_does_not_take_a_confident_choice_back() -> None:
    detection = Detection(None)
    await detection.turn()
    detection.choose({"en": 0.9, "de": 0.1})
    detection.conclude(None)
    assert detection.code == "en"
