"""A request from its recording to its transcript."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asr_server.audio.recording import Cancelled, Recording
from asr_server.core import Chunk, DecodingOptions, Samples
from asr_server.transcription.progress import PreviousText
from asr_server.transcription.segments import DecodedPart, Span
from asr_server.transcription.transcriber import (
    Transcriber,
    boosted_keywords,
    first_error,
    prompt_tokens,
    task_group,
)
from tests.support.fake_replica import noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.tokens import TOKENIZER, make_tokenizer, words
from tests.support.until import until
from tests.unit.transcription.running_app import ENGLISH, THREE_CHUNKS, RunningApp, two_channels


async def test_detection_stays_among_the_candidates(app: RunningApp) -> None:
    app.replica.probabilities = {"de": 0.9, "en": 0.06, "zh": 0.04}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions(candidate_languages=("en", "zh")))
    assert transcript.language == "english"


async def test_conditioned_on_text_the_first_chunk_decides_on_the_language(app: RunningApp) -> None:
    """Its text is the prompt of the next one, so it waits for no other's vote."""
    app.replica.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    await app.transcribe(THREE_CHUNKS, DecodingOptions(condition_on_previous_text=True))
    assert [submit.options.language for submit in app.replica.submits] == [None, "de", "de"]


@pytest.mark.parametrize(
    ("speakers", "options", "is_early"),
    [((), {}, True), ((), {"max_new_tokens": 50}, False), (("ann", "bob"), {}, False)],
)
async def test_segments_are_asked_for_early_unless_channels_or_a_limit_hold_them_back(
    app: RunningApp, speakers: tuple[str, ...], options: dict[str, Any], is_early: bool
) -> None:
    asked = DecodingOptions(language="en", early_results=True, streams=True, **options)
    await app.transcribe(two_channels((0, 0, 5), (1, 2, 4)), asked, speakers)
    assert {submit.options.early_results for submit in app.replica.submits} == {is_early}


async def test_a_recording_is_decoded_once_its_track_of_speakers_has_room(app: RunningApp) -> None:
    has_room, asked = asyncio.Event(), list[int]()

    class Track:
        async def wait_for_room(self) -> None:
            asked.append(app.pool.stats.slices)
            await has_room.wait()

        def push(self, samples: Samples) -> None:
            pass

        def close(self) -> None:
            pass

    recording = Recording(MemoryFile(THREE_CHUNKS))
    async with app.transcriber.run(recording, ENGLISH, labeller=Track()) as transcription:  # type: ignore[arg-type]
        await until(lambda: asked)
        assert app.pool.stats.slices == 0
        has_room.set()
        assert len([delta async for delta in transcription]) == 3
    assert asked == list(range(app.pool.stats.slices))


async def test_cancelling_a_request_cancels_its_chunks_and_closes_its_recording(app: RunningApp) -> None:
    app.replica.holding = True
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(app.replica.cancelled) == 1
    assert app.dispatcher.num_chunks == 0


async def test_leaving_a_request_closes_its_recording_and_ends_its_tasks(app: RunningApp) -> None:
    app.replica.holding = True
    recording = Recording(MemoryFile(THREE_CHUNKS))
    async with app.transcriber.run(recording, ENGLISH):
        pass
    with pytest.raises(Cancelled):
        recording.next_slice()


async def test_live_speech_goes_before_files(app: RunningApp, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    open_request = app.dispatcher.open

    def noted(handle_id: str, is_live: bool) -> object:
        opened.append(is_live)
        return open_request(handle_id, is_live)

    monkeypatch.setattr(app.dispatcher, "open", noted)
    delta = await app.transcriber.transcribe_chunk(Chunk(0, 0, noise(3)), ENGLISH)
    assert (delta.text, opened) == ("zero", [True])
    await app.transcribe(wav(noise(3)))
    assert opened == [True, False]


async def test_a_model_translates_if_it_has_several_languages_and_the_task(app: RunningApp) -> None:
    def can_translate(tokenizer: Any) -> bool:
        return Transcriber(app.dispatcher, app.pool, tokenizer).can_translate

    assert can_translate(TOKENIZER)
    assert not can_translate(make_tokenizer(("en",)))
    assert not can_translate(SimpleNamespace(specials=replace(TOKENIZER.specials, translate=None)))


def said(tokens: tuple[int, ...]) -> str:
    return TOKENIZER.decode(tokens)


def test_a_prompt_begins_with_a_space_as_spoken_text_does() -> None:
    assert said(prompt_tokens(TOKENIZER, "hello\n")) == " hello"


def test_the_end_of_a_long_prompt_is_kept() -> None:
    tokens = prompt_tokens(TOKENIZER, "a" * 1000 + "the end")
    assert len(tokens) == 223
    assert said(tokens).endswith("the end")


def test_the_text_of_a_special_token_stays_text() -> None:
    tokens = prompt_tokens(TOKENIZER, "<|endoftext|><|translate|>")
    assert all(TOKENIZER.is_text(token) for token in tokens)
    assert said(tokens) == " <|endoftext|><|translate|>"


def test_the_first_sixty_four_keywords_get_a_bonus_each_once() -> None:
    many = [str(number) for number in range(64 + 5)]
    assert boosted_keywords([" 0 ", "", "0", *many]) == tuple(many[:64])


def part_of(digits: str, temperature: float, num_read: int = 9) -> DecodedPart:
    result = msgspec.structs.replace(say(*words("1")), temperature=temperature)
    spans = tuple(Span(0.0, 1.0, words(digit), (-0.1,)) for digit in digits)
    return DecodedPart(0.0, 1.0, result, spans, num_read)


def test_the_text_so_far_follows_the_requests_prompt() -> None:
    text = PreviousText(words("9"))
    text.add(part_of("12", 0.0))
    text.add(part_of("3", 0.5))
    assert text.tokens == words("9123")
    text.add(part_of("4" * 222, 0.0))
    assert text.tokens == words("3" + "4" * 222)


@pytest.mark.parametrize(("num_read", "kept"), [(1, ""), (0, "9")])
def test_text_of_a_high_temperature_ends_the_prompt_but_silence_does_not(num_read: int, kept: str) -> None:
    text = PreviousText(words("9"))
    text.add(part_of("", 0.6, num_read))
    assert text.tokens == words(kept)


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("task")


async def fail(error: BaseException) -> None:
    raise error


async def test_an_error_of_a_task_ends_the_others_and_the_block_and_is_raised_by_itself() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with task_group() as group:
            group.create_task(forever(ended))
            group.create_task(fail(LookupError("first")))
            await forever(ended)

    with pytest.raises(LookupError, match="first"):
        await block()
    assert ended == ["task", "task"]


async def test_an_error_of_the_block_ends_the_tasks_and_is_raised_by_itself() -> None:
    ended: list[str] = []

    async def block() -> None:
        async with task_group() as group:
            group.create_task(forever(ended))
            await asyncio.sleep(0)  # it begins
            raise LookupError("block")

    with pytest.raises(LookupError, match="block"):
        await block()
    assert ended == ["task"]


def test_the_first_error_is_found_in_groups_of_groups() -> None:
    first, second = LookupError("first"), ValueError("second")
    inner = BaseExceptionGroup("inner", [first, second])
    assert first_error(BaseExceptionGroup("outer", [inner, second])) is first
