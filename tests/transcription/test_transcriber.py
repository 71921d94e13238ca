import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from asr_server.audio import PreprocessPool, Recording
from asr_server.config import Settings
from asr_server.core import ChunkResult, DecodingOptions, Passage, Submit, Transcript
from asr_server.errors import ChunkFailed, InvalidAudio
from asr_server.transcription import Transcriber
from asr_server.transcription.transcriber import MAX_PARTS
from asr_server.workers.dispatcher import Dispatcher
from tests.parrot import Parrot, noise, say, wav
from tests.vocabulary import at, make_tokenizer, words

TOKENIZER = make_tokenizer()
ENGLISH = DecodingOptions(language="en")
TIMED = DecodingOptions(language="en", timestamps=True)
THREE_CHUNKS = wav(noise(75))


def t(time_s: float) -> int:
    return at(TOKENIZER, time_s)


def number_of_the_chunk(submit: Submit) -> ChunkResult:
    return say(*words(str(submit.id.chunk)))


class House:
    """A transcriber between a real pool and a parrot."""

    def __init__(self, credit: int = 100, workers: int = 2) -> None:
        self.answer: Callable[[Submit], ChunkResult | Exception] = number_of_the_chunk
        self.parrot = Parrot(lambda submit: self.answer(submit), credit)
        self.dispatcher = Dispatcher(Settings(chunks_ahead=2), self.parrot)
        self.pool = PreprocessPool(workers)
        self.transcriber = Transcriber(self.dispatcher, self.pool, TOKENIZER)

    async def hear(
        self, source: bytes, options: DecodingOptions = ENGLISH
    ) -> tuple[list[Passage], Transcript]:
        async with self.transcriber.transcribe(Recording(source), options) as course:
            passages = [passage async for passage in course]
            return passages, course.transcript()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.dispatcher.start()
    yield house
    await house.dispatcher.stop()
    house.pool.shutdown()


async def until(condition: Callable[[], object]) -> None:
    """Lets the event loop turn until the condition holds; the test's own limit bounds it."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_file_of_several_chunks_comes_back_as_one_text(house: House) -> None:
    passages, transcript = await house.hear(THREE_CHUNKS)
    assert transcript.text == "zero one two"
    assert "".join(passage.text for passage in passages) == transcript.text
    assert transcript.duration_s == pytest.approx(75.0)
    assert transcript.language == "english"
    assert [segment.id for segment in transcript.segments] == [0, 1, 2]
    assert transcript.num_audio_tokens == sum(passage.num_audio_tokens for passage in passages)
    assert transcript.num_text_tokens == 3


async def test_passages_come_in_the_order_of_the_file_whatever_order_the_chunks_are_read_in(
    house: House,
) -> None:
    house.parrot.holding = True
    hearing = asyncio.create_task(house.hear(THREE_CHUNKS))
    await until(lambda: len(house.parrot.held) == 3)
    for submit in reversed(house.parrot.held):
        house.parrot.release(submit)
    passages, _ = await hearing
    assert [passage.text for passage in passages] == ["zero", " one", " two"]


async def test_the_first_passage_does_not_wait_for_the_second(house: House) -> None:
    house.parrot.holding = True
    async with house.transcriber.transcribe(Recording(THREE_CHUNKS), ENGLISH) as course:
        passages = aiter(course)
        await until(lambda: house.parrot.held)
        house.parrot.release(house.parrot.held[0])
        assert (await anext(passages)).text == "zero"
        await until(lambda: len(house.parrot.held) == 2)


async def test_an_unread_tail_is_sent_again_as_the_next_part(house: House) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if submit.id.part == 0:
            return say(t(0), *words("1"), t(4), t(4.5), *words("9"))
        return say(t(0.5), *words("2"), t(3))

    house.answer = answer
    _, transcript = await house.hear(wav(noise(12)), TIMED)
    assert transcript.text == "one two"
    assert [(s.start_s, s.end_s) for s in transcript.segments] == [(0.0, 4.0), (4.5, 7.0)]
    assert [len(submit.samples) for submit in house.parrot.submits] == [12 * 16_000, 8 * 16_000]
    assert transcript.segments[1].seek == 400


async def test_the_parts_of_a_chunk_are_bounded(house: House) -> None:
    house.answer = lambda submit: say(t(0), *words("1"), t(0.5), t(0.5), *words("2"))
    _, transcript = await house.hear(wav(noise(20)), TIMED)
    assert len(house.parrot.submits) == MAX_PARTS
    assert transcript.text == " ".join(["one"] * MAX_PARTS) + " two"


async def test_what_ran_out_of_positions_without_times_is_read_again_with_them(house: House) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if not submit.options.timestamps:
            return say(*words("1111"), finish_reason="length")
        return say(t(0), *words("12"), t(20))

    house.answer = answer
    _, transcript = await house.hear(wav(noise(20)))
    assert transcript.text == "one two"


async def test_a_limit_set_by_the_client_is_an_end(house: House) -> None:
    house.answer = lambda submit: say(*words("1"), finish_reason="length")
    _, transcript = await house.hear(wav(noise(20)), DecodingOptions(language="en", max_new_tokens=1))
    assert (transcript.text, len(house.parrot.submits)) == ("one", 1)


async def test_the_first_chunk_detects_the_language_and_the_others_carry_it(house: House) -> None:
    house.parrot.probabilities = {"de": 0.9, "en": 0.1}
    _, transcript = await house.hear(THREE_CHUNKS, DecodingOptions())
    assert transcript.language == "german"
    assert house.parrot.languages_set == ["de"]
    assert [submit.options.language for submit in house.parrot.submits] == [None, "de", "de"]


async def test_while_the_language_is_open_no_second_chunk_goes_out(house: House) -> None:
    house.parrot.holding = True
    house.parrot.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    hearing = asyncio.create_task(house.hear(THREE_CHUNKS, DecodingOptions()))
    await until(lambda: house.parrot.languages_set)
    await until(lambda: house.pool.stats.turns >= 2)
    assert len(house.parrot.submits) == 1
    house.parrot.holding = False
    house.parrot.release(house.parrot.held[0])
    _, transcript = await hearing
    assert [submit.options.language for submit in house.parrot.submits] == [None, "de", "de"]
    assert transcript.language == "german"


async def test_a_first_chunk_without_speech_leaves_detection_to_the_next(house: House) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if submit.id.chunk == 0:
            return say(*words("9"), no_speech_prob=0.9, avg_logprob=-2)
        return number_of_the_chunk(submit)

    house.answer = answer
    house.parrot.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    _, transcript = await house.hear(THREE_CHUNKS, DecodingOptions())
    assert [submit.options.language for submit in house.parrot.submits] == [None, None, "de"]
    assert transcript.text == "one two"


async def test_detection_stays_among_the_candidates(house: House) -> None:
    house.parrot.probabilities = {"de": 0.9, "en": 0.06, "zh": 0.04}
    _, transcript = await house.hear(THREE_CHUNKS, DecodingOptions(candidate_languages=("en", "zh")))
    assert transcript.language == "english"


async def test_silence_is_an_empty_text(house: House) -> None:
    passages, transcript = await house.hear(wav(np.zeros(32_000, np.float32)), DecodingOptions())
    assert (transcript.text, transcript.segments) == ("", ())
    assert all(passage.text == "" for passage in passages)
    assert transcript.duration_s == 2.0


async def test_what_is_no_audio_raises_what_it_is(house: House) -> None:
    with pytest.raises(InvalidAudio):
        await house.hear(b"this is no audio at all" * 100)


async def test_a_chunk_that_fails_ends_the_request_and_cancels_the_rest(house: House) -> None:
    house.parrot.holding = True
    house.answer = lambda submit: RuntimeError("broken")
    hearing = asyncio.create_task(house.hear(THREE_CHUNKS))
    await until(lambda: len(house.parrot.held) == 3)
    house.parrot.release(house.parrot.held[1])
    with pytest.raises(ChunkFailed, match="broken"):
        await hearing
    assert house.parrot.held == []
    assert house.dispatcher.num_chunks == 0


async def test_cancelling_a_request_cancels_its_chunks_and_closes_its_recording(house: House) -> None:
    house.parrot.holding = True
    hearing = asyncio.create_task(house.hear(THREE_CHUNKS))
    await until(lambda: len(house.parrot.held) >= 2)
    hearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hearing
    assert len(house.parrot.cancelled) == 1
    assert house.dispatcher.num_chunks == 0


async def test_leaving_early_cancels_the_rest(house: House) -> None:
    house.parrot.holding = True
    async with house.transcriber.transcribe(Recording(THREE_CHUNKS), ENGLISH):
        await until(lambda: house.parrot.held)
    assert house.dispatcher.num_chunks == 0


async def test_a_long_file_is_decoded_only_a_few_chunks_ahead() -> None:
    house = House(credit=0, workers=1)
    await house.dispatcher.start()
    hearing = asyncio.create_task(house.hear(wav(noise(600))))
    await until(lambda: house.dispatcher.num_chunks >= 2)
    for _ in range(20):  # each waits behind a turn, if there is one
        await house.pool.run(lambda: None)
    assert house.dispatcher.num_chunks <= 3
    hearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hearing
    await house.dispatcher.stop()
    house.pool.shutdown()


async def test_a_truncated_recording_is_named_in_the_log(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, transcript = await house.hear(wav(noise(4))[: 2 * 32_000])
    assert transcript.text == "zero"
    assert "ends early" in caplog.text
