"""A request from its recording to its transcript: when chunks go out, and when text returns."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from asr_server.audio.recording import Cancelled, Recording
from asr_server.core import SAMPLE_RATE, Chunk, ChunkResult, DecodingOptions, Samples, TranscriptDelta
from asr_server.dispatch.queue import CHUNKS_AHEAD
from asr_server.errors import ChunkFailed
from asr_server.metrics import REGISTRY
from asr_server.transcription.progress import PreviousText
from asr_server.transcription.segments import DecodedPart, Span
from asr_server.transcription.transcriber import (
    Transcriber,
    Transcription,
    boosted_keywords,
    first_error,
    prompt_tokens,
    task_group,
)
from asr_server.transport.messages import Submit
from tests.support.fake_replica import noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.speech import say as speak
from tests.support.tokens import TOKENIZER, make_tokenizer, t, words
from tests.support.until import until
from tests.unit.transcription.running_app import (
    ENGLISH,
    THREE_CHUNKS,
    RunningApp,
    number_of_the_chunk,
    two_channels,
)


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


async def test_deltas_come_in_the_files_order_however_chunks_are_read(app: RunningApp) -> None:
    app.replica.holding = True
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) == 3)
    for submit in reversed(app.replica.held):
        app.replica.release(submit)
    deltas, _ = await running
    assert [delta.text for delta in deltas] == ["zero", " one", " two"]


async def test_the_audio_is_counted_as_far_as_it_is_read_and_once(app: RunningApp) -> None:
    recording = Recording(MemoryFile(two_channels((0, 0, 20), (1, 25, 40))), split_channels=True)
    async with app.transcriber.run(recording, ENGLISH, ("ann", "bob")) as transcription:
        assert isinstance(transcription, Transcription)
        async for delta in transcription:
            assert transcription.handle.stats.audio_s == pytest.approx(delta.end_s)
        assert transcription.handle.stats.audio_s == pytest.approx(75.0)


async def test_live_speech_is_not_counted(app: RunningApp) -> None:
    def transcribed_s() -> float:
        name = "asr_audio_transcribed_seconds"
        return sum(
            sample.value
            for metric in REGISTRY.collect()
            if metric.name == name
            for sample in metric.samples
            if sample.name == f"{name}_total"
        )

    before_s = transcribed_s()
    delta = await app.transcriber.transcribe_chunk(Chunk(0, 0, noise(3.0)), ENGLISH)
    assert (delta.text, delta.end_s) == ("zero", 3.0)
    assert transcribed_s() == before_s
    await app.transcribe(wav(noise(3.0)))
    assert transcribed_s() == pytest.approx(before_s + 3.0)


async def test_while_the_language_is_open_no_second_chunk_goes_out(app: RunningApp) -> None:
    app.replica.holding = True
    app.replica.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS, DecodingOptions()))
    await until(lambda: app.replica.languages_set)
    await until(lambda: app.pool.stats.slices >= 2)
    assert len(app.replica.submits) == 1
    app.replica.stop_holding()
    _, transcript = await running
    assert [submit.options.language for submit in app.replica.submits] == [None, None, None]
    assert transcript.language == "german"
    assert transcript.language_probability == pytest.approx(0.4**3 / (0.4**3 + 2 * 0.3**3))


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
async def test_a_stream_whose_language_is_in_doubt_ends(app: RunningApp, num_chunks: int) -> None:
    """Its first chunk waits for the votes of others, which wait for its text no longer."""
    app.replica.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    options = DecodingOptions(early_results=True, streams=True)
    async with asyncio.timeout(60):
        _, transcript = await app.transcribe(wav(noise(25 * num_chunks)), options)
    assert transcript.text == " ".join(("zero", "one", "two")[:num_chunks])
    assert transcript.language == "german"


async def test_a_first_chunk_without_speech_leaves_detection_to_the_next(app: RunningApp) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if submit.id.chunk == 0:
            return say(*words("9"), no_speech_prob=0.9, avg_logprob=-2)
        return number_of_the_chunk(submit)

    app.answer = answer
    app.replica.probabilities = {"de": 0.4, "en": 0.3, "zh": 0.3}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert [submit.options.language for submit in app.replica.submits] == [None, None, None]
    assert (transcript.text, transcript.language) == ("one two", "german")
    assert transcript.language_probability == pytest.approx(0.4**2 / (0.4**2 + 2 * 0.3**2))


async def test_the_first_chunk_detects_the_language_and_the_others_carry_it(app: RunningApp) -> None:
    app.replica.probabilities = {"de": 0.9, "en": 0.1}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert transcript.language == "german"
    assert app.replica.languages_set == ["de"]
    assert [submit.options.language for submit in app.replica.submits] == [None, "de", "de"]


async def test_a_chunk_that_fails_ends_the_request_and_cancels_the_rest(app: RunningApp) -> None:
    app.replica.holding = True
    app.answer = lambda submit: RuntimeError("broken")
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) == 3)
    app.replica.release(app.replica.held[1])
    with pytest.raises(ChunkFailed, match="broken"):
        await running
    assert app.replica.held == []
    assert app.dispatcher.num_chunks == 0


async def test_a_long_file_is_decoded_only_a_few_chunks_ahead() -> None:
    app = RunningApp(credit=0, workers=1)
    await app.dispatcher.start()
    running = asyncio.create_task(app.transcribe(wav(noise(600))))
    await until(lambda: app.dispatcher.num_chunks >= 2)
    for _ in range(20):  # each waits behind a slice, if there is one
        await app.pool.run(lambda: None)
    assert app.dispatcher.num_chunks <= CHUNKS_AHEAD + 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await app.dispatcher.stop()
    app.pool.shutdown()


async def test_a_channel_that_is_silent_does_not_hold_up_the_other(app: RunningApp) -> None:
    app.replica.holding = True
    app.answer = lambda submit: say(t(0), *words(str(submit.id.chunk)), t(2))
    recording = Recording(MemoryFile(two_channels((0, 0, 75))), split_channels=True)
    async with app.transcriber.run(recording, ENGLISH, ("ann", "bob")) as transcription:
        await until(lambda: len(app.replica.held) >= 2)
        app.replica.release(app.replica.held[0])
        texts = [delta.text async for delta in _until_text(transcription)]
        assert texts[-1] == "zero"


async def _until_text(transcription: Transcription) -> AsyncIterator[TranscriptDelta]:
    async for delta in transcription:
        yield delta
        if delta.text:
            return


async def test_a_chunk_of_live_speech_has_the_text_of_all_its_stretches(app: RunningApp) -> None:
    app.answer = lambda submit: say(t(0.1), *words("2" if submit.id.part else "1"), t(0.3))
    pause = np.zeros(5 * SAMPLE_RATE, np.float32)
    sound = np.concatenate([speak("1").samples, pause, speak("2").samples])
    delta = await app.transcriber.transcribe_chunk(Chunk(0, 0, sound), ENGLISH)
    assert [segment.text for segment in delta.segments] == [" one", " two"]
    assert delta.text == "one two"
