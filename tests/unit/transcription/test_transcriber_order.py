"""When chunks go out, and when text returns."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from asr_server.audio.recording import Recording
from asr_server.core import Chunk, ChunkResult, DecodingOptions, TranscriptDelta
from asr_server.dispatch.queue import CHUNKS_AHEAD
from asr_server.errors import ChunkFailed
from asr_server.metrics import REGISTRY
from asr_server.transcription.transcriber import Transcription
from asr_server.transport.messages import Submit
from tests.support.fake_replica import noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.tokens import t, words
from tests.support.until import until
from tests.unit.transcription.running_app import (
    ENGLISH,
    THREE_CHUNKS,
    RunningApp,
    number_of_the_chunk,
    two_channels,
)


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
    app.replica.holding = False
    app.replica.release(app.replica.held[0])
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
