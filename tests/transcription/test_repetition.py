"""Sentences that a model says again: of its prompt, and right behind each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Recording
from asr_server.channel.messages import Submit
from asr_server.core import Chunk, ChunkResult, DecodingOptions, Transcript
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.transcription import Transcriber
from asr_server.transcription.repetition import letters_of, said_in, until_repetition, without_echoes
from asr_server.transcription.segments import DecodedPart, Span, decode_part
from asr_server.transcription.voice_check import SpokenChunk
from tests.embedded import embedded
from tests.fake_replica import FakeReplica, noise, say, wav
from tests.memory_file import MemoryFile
from tests.vocabulary import at, make_tokenizer, words

TOKENIZER = make_tokenizer()
SENTENCE, OTHER = words("3141"), words("2718")


def t(time_s: float) -> int:
    return at(TOKENIZER, time_s)


async def read(
    answers: Sequence[ChunkResult],
    options: DecodingOptions,
    probabilities: Callable[[Submit], dict[str, float] | None] = lambda _: None,
) -> tuple[Transcript, list[Submit]]:
    """What becomes of four seconds whose parts are answered so, in turn, and the parts that were sent."""
    following = iter(answers)
    replica = FakeReplica(lambda submit: next(following))
    replica.probabilities_of = probabilities
    dispatcher, pool = Dispatcher(embedded(), replica), PreprocessPool(1)
    await dispatcher.start()
    try:
        recording = Recording(MemoryFile(wav(noise(4.0))))
        transcriber = Transcriber(dispatcher, pool, TOKENIZER, check_voice=False)
        async with transcriber.run(recording, options) as session:
            async for _ in session:
                pass
            return await session.transcript(), replica.submits
    finally:
        await dispatcher.stop()
        await asyncio.to_thread(pool.shutdown)


def text_of(transcript: Transcript) -> list[str]:
    return [segment.text.strip() for segment in transcript.segments]


FIRST = say(t(0), *SENTENCE, t(1.5), t(1.5))  # and leaves the rest unread
AGAIN = say(t(0), *SENTENCE, t(1))
ENGLISH = DecodingOptions(language="en", prompt_tokens=tuple(words("9")), early_results=True)


async def test_a_tail_that_repeats_its_prompt_is_read_without_it() -> None:
    transcript, submits = await read([FIRST, AGAIN, say(t(0), *OTHER, t(1))], ENGLISH)
    assert text_of(transcript) == ["three one four one", "two seven one eight"]
    assert [len(submit.options.prompt_tokens) for submit in submits] == [1, 1 + len(FIRST.tokens) - 1, 1]
    assert [len(submit.samples) for submit in submits] == [64_000, 40_000, 40_000]
    assert {submit.options.language for submit in submits} == {"en"}


async def test_what_comes_before_the_repetition_is_kept() -> None:
    tail = say(t(0), *OTHER, t(1), t(1), *SENTENCE, t(2))
    transcript, submits = await read([FIRST, tail, say(t(0), *words("5"), t(1))], ENGLISH)
    assert text_of(transcript) == ["three one four one", "two seven one eight", "five"]
    assert len(submits[2].samples) == 24_000


async def test_a_sentence_that_is_really_said_twice_is_written_twice() -> None:
    transcript, submits = await read([FIRST, AGAIN, AGAIN], ENGLISH)
    assert text_of(transcript) == ["three one four one"] * 2
    assert len(submits) == 3


async def test_a_short_answer_may_be_said_twice() -> None:
    short = say(t(0), *words("1"), t(1.5), t(1.5))
    _, submits = await read([short, say(t(0), *words("1"), t(1))], ENGLISH)
    assert len(submits) == 2


async def test_a_repeated_prompt_is_read_again_in_a_language_of_its_own() -> None:
    """The language of the file, which other parts have, does not change."""

    def probabilities(submit: Submit) -> dict[str, float]:
        return {"en": 0.9, "de": 0.1} if submit.id.part == 0 else {"en": 0.1, "de": 0.9}

    answers = [FIRST, AGAIN, say(t(0), *OTHER, t(1))]
    transcript, submits = await read(answers, DecodingOptions(early_results=True), probabilities)
    assert [submit.options.language for submit in submits] == [None, "en", None]
    assert text_of(transcript) == ["three one four one", "two seven one eight"]
    assert transcript.language == "english"


def part_of(*times_s: tuple[float, float]) -> tuple[DecodedPart, Chunk]:
    """The same sentence at each of these times."""
    chunk = Chunk(0, 0, noise(20.0))
    tokens = [token for start_s, end_s in times_s for token in (t(start_s), *SENTENCE, t(end_s))]
    return decode_part(chunk, say(*tokens), DecodingOptions(language="en"), TOKENIZER), chunk


def test_of_equal_neighbours_the_one_without_enough_speech_goes() -> None:
    part, chunk = part_of((0, 2), (4, 6), (8, 10))
    spoken = SpokenChunk([chunk], [(0.0, 2.0), (8.0, 10.0)], [(0.2, 2.0), (8.0, 10.0)])
    kept = without_echoes(part, "", spoken, TOKENIZER)
    assert kept.spans == (part.spans[0], part.spans[2])
    sentence = letters_of(part.spans[0], TOKENIZER)
    assert without_echoes(
        part, sentence, SpokenChunk([chunk], [(8.0, 10.0)], [(8.0, 10.0)]), TOKENIZER
    ).spans == (part.spans[2],)
    assert without_echoes(part, "", spoken, TOKENIZER, num_sent=2).spans == part.spans
    assert without_echoes(part, "", SpokenChunk([chunk]), TOKENIZER) == part, "nobody has listened"


def test_sentences_of_twelve_letters_are_watched_for() -> None:
    def spans(digits: str) -> tuple[Span, Span]:
        return Span(0.0, 1.0, words(digits), ()), Span(1.0, 2.0, words(digits), ())

    for digits, is_long in (("6126", True), ("456", False)):
        part = DecodedPart(0.0, 8.0, FIRST, spans(digits), 9)
        assert said_in([part], TOKENIZER) == ({"sixonetwosix"} if is_long else set())
        elsewhere = SpokenChunk([], [(6.0, 7.0)], [(6.0, 7.0)])
        assert len(without_echoes(part, "", elsewhere, TOKENIZER).spans) == (1 if is_long else 2)


def test_another_sentence_stays_however_little_of_it_is_certainly_spoken() -> None:
    part = DecodedPart(0.0, 8.0, FIRST, (Span(0, 1, SENTENCE, ()), Span(1, 2, OTHER, ())), 9)
    assert without_echoes(part, "", SpokenChunk([], [], [(6.0, 7.0)]), TOKENIZER) == part


@pytest.mark.parametrize(("spoken_s", "stays"), [(0.5, True), (0.484375, False)])
def test_fifteen_letters_are_said_twice_in_half_a_second(spoken_s: float, stays: bool) -> None:
    part, chunk = part_of((0, 2), (4, 6))
    spoken = SpokenChunk([chunk], [], [(4.0, 4.0 + spoken_s)])
    assert (len(without_echoes(part, "", spoken, TOKENIZER).spans) == 2) == stays


def test_a_part_is_cut_before_its_first_segment_too() -> None:
    part = DecodedPart(0.0, 0.2, FIRST, (Span(0.1, 0.2, SENTENCE, ()),), 9)
    cut = until_repetition(part, {letters_of(part.spans[0], TOKENIZER)}, TOKENIZER)
    assert cut is not None
    assert (cut.spans, cut.tail_s) == ((), 0.0)


@pytest.mark.parametrize(("duration_s", "tail_s"), [(6.25, 6.0), (6.1875, None), (6.0, None)])
def test_what_repeats_its_prompt_at_the_very_end_is_not_read_again(
    duration_s: float, tail_s: float | None
) -> None:
    spans = Span(0, 6.0, OTHER, ()), Span(6.0, duration_s, SENTENCE, ())
    part = DecodedPart(0.0, duration_s, FIRST, spans, 9)
    cut = until_repetition(part, {letters_of(spans[1], TOKENIZER)}, TOKENIZER)
    assert cut is not None
    assert (cut.spans, cut.tail_s) == (spans[:1], tail_s)
