import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest

from asr_server.audio.pool import PreprocessPool
from asr_server.audio.recording import Recording
from asr_server.channel.messages import Submit
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples, Transcript, TranscriptDelta
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.errors import ChunkFailed, InvalidAudio
from asr_server.transcription import RequestSession, Transcriber
from asr_server.transcription.chunk_reader import MAX_PARTS
from tests.embedded import embedded
from tests.fake_replica import FakeReplica, noise, say, wav
from tests.memory_file import MemoryFile
from tests.speech import say as speak
from tests.vocabulary import at, make_tokenizer, spell, words

TOKENIZER = make_tokenizer()
ENGLISH = DecodingOptions(language="en", token_logprobs=True)
THREE_CHUNKS = wav(noise(75))


def t(time_s: float) -> int:
    return at(TOKENIZER, time_s)


def number_of_the_chunk(submit: Submit) -> ChunkResult:
    return say(*words(str(submit.id.chunk)))


class RunningApp:
    """A transcriber between a real pool and a replica."""

    def __init__(self, credit: int = 100, workers: int = 2) -> None:
        self.answer: Callable[[Submit], ChunkResult | Exception] = number_of_the_chunk
        self.replica = FakeReplica(lambda submit: self.answer(submit), credit)
        self.dispatcher = Dispatcher(embedded(chunks_ahead=2), self.replica)
        self.pool = PreprocessPool(workers)
        self.transcriber = Transcriber(self.dispatcher, self.pool, TOKENIZER)

    async def transcribe(
        self, source: bytes, options: DecodingOptions = ENGLISH, speakers: tuple[str, ...] = ()
    ) -> tuple[list[TranscriptDelta], Transcript]:
        recording = Recording(MemoryFile(source), split_channels=bool(speakers))
        async with self.transcriber.transcribe(recording, options, speakers) as session:
            deltas = [delta async for delta in session]
            return deltas, session.transcript()


@pytest.fixture
async def app() -> AsyncIterator[RunningApp]:
    app = RunningApp()
    await app.dispatcher.start()
    yield app
    await app.dispatcher.stop()
    app.pool.shutdown()


async def until(condition: Callable[[], object]) -> None:
    """Lets the event loop run until the condition holds; the test's own limit bounds it."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_file_of_several_chunks_comes_back_as_one_text(app: RunningApp) -> None:
    deltas, transcript = await app.transcribe(THREE_CHUNKS)
    assert transcript.text == "zero one two"
    assert "".join(delta.text for delta in deltas) == transcript.text
    assert transcript.duration_s == pytest.approx(75.0)
    assert transcript.language == "english"
    assert [segment.id for segment in transcript.segments] == [0, 1, 2]
    assert transcript.num_audio_tokens == sum(delta.num_audio_tokens for delta in deltas)
    assert transcript.num_text_tokens == 3


async def test_deltas_come_in_the_order_of_the_file_whatever_order_the_chunks_are_read_in(
    app: RunningApp,
) -> None:
    app.replica.holding = True
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) == 3)
    for submit in reversed(app.replica.held):
        app.replica.release(submit)
    deltas, _ = await running
    assert [delta.text for delta in deltas] == ["zero", " one", " two"]


async def test_the_first_delta_does_not_wait_for_the_second(app: RunningApp) -> None:
    app.replica.holding = True
    async with app.transcriber.transcribe(Recording(MemoryFile(THREE_CHUNKS)), ENGLISH) as session:
        deltas = aiter(session)
        await until(lambda: app.replica.held)
        app.replica.release(app.replica.held[0])
        assert (await anext(deltas)).text == "zero"
        await until(lambda: len(app.replica.held) == 2)


async def test_an_unread_tail_is_sent_again_as_the_next_part(app: RunningApp) -> None:
    def answer(submit: Submit) -> ChunkResult:
        if submit.id.part == 0:
            return say(t(0), *words("1"), t(4), t(4.5), *words("9"))
        return say(t(0.5), *words("2"), t(3))

    app.answer = answer
    _, transcript = await app.transcribe(wav(noise(12)), ENGLISH)
    assert transcript.text == "one two"
    assert [(s.start_s, s.end_s) for s in transcript.segments] == [(0.0, 4.0), (4.5, 7.0)]
    assert [len(submit.samples) for submit in app.replica.submits] == [12 * 16_000, 8 * 16_000]
    assert transcript.segments[1].seek == 400


async def test_the_parts_of_a_chunk_are_bounded(app: RunningApp) -> None:
    app.answer = lambda submit: say(t(0), *words("1"), t(0.5), t(0.5), *words("2"))
    _, transcript = await app.transcribe(wav(noise(20)), ENGLISH)
    assert len(app.replica.submits) == MAX_PARTS
    assert transcript.text == " ".join(["one"] * MAX_PARTS) + " two"


async def test_a_limit_set_by_the_client_is_an_end(app: RunningApp) -> None:
    app.answer = lambda submit: say(*words("1"), finish_reason="length")
    _, transcript = await app.transcribe(wav(noise(20)), DecodingOptions(language="en", max_new_tokens=1))
    assert (transcript.text, len(app.replica.submits)) == ("one", 1)


async def test_the_first_chunk_detects_the_language_and_the_others_carry_it(app: RunningApp) -> None:
    app.replica.probabilities = {"de": 0.9, "en": 0.1}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert transcript.language == "german"
    assert app.replica.languages_set == ["de"]
    assert [submit.options.language for submit in app.replica.submits] == [None, "de", "de"]


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


async def test_a_chunk_that_was_outvoted_is_read_again_in_the_files_language(app: RunningApp) -> None:
    told = [{"de": 0.5, "en": 0.4, "zh": 0.1}, {"de": 0.02, "en": 0.97, "zh": 0.01}]
    app.replica.probabilities_of = lambda submit: told[min(submit.id.chunk, 1)]
    deltas, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions())
    assert app.replica.languages_set == ["de", "en"]
    asked = [(submit.id.chunk, submit.options.language) for submit in app.replica.submits]
    assert sorted(asked, key=str) == sorted([(0, None), (1, None), (0, "en"), (2, "en")], key=str)
    assert {delta.language for delta in deltas} == {"en"}
    assert (transcript.text, transcript.languages) == ("zero one two", ("en",))


async def test_a_mixed_recording_is_read_chunk_by_chunk_in_the_language_of_each(app: RunningApp) -> None:
    spoken = ["de", "en", "en"]
    app.replica.probabilities_of = lambda submit: {
        code: 0.9 if code == spoken[submit.id.chunk] else 0.1 for code in ("de", "en")
    }
    app.answer = lambda submit: msgspec.structs.replace(
        number_of_the_chunk(submit), language=spoken[submit.id.chunk]
    )
    deltas, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions(multilingual=True))
    assert [submit.options.language for submit in app.replica.submits] == [None] * 3
    assert app.replica.languages_set == spoken
    assert [delta.language for delta in deltas] == spoken
    assert (transcript.language, transcript.languages) == ("english", ("de", "en"))


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


async def test_detection_stays_among_the_candidates(app: RunningApp) -> None:
    app.replica.probabilities = {"de": 0.9, "en": 0.06, "zh": 0.04}
    _, transcript = await app.transcribe(THREE_CHUNKS, DecodingOptions(candidate_languages=("en", "zh")))
    assert transcript.language == "english"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (say(*words("5"), avg_logprob=-0.9), ""),
        (say(*words("5"), no_speech_prob=0.3), ""),
        (say(*words("5")), "five"),
    ],
)
async def test_a_doubtful_text_is_dropped_where_nobody_speaks(
    app: RunningApp, result: ChunkResult, text: str
) -> None:
    app.answer = lambda submit: result
    deltas, transcript = await app.transcribe(wav(noise(4)))
    assert transcript.text == "".join(delta.text for delta in deltas) == text
    assert len(transcript.segments) == len(transcript.logprobs) == len(text.split())


async def test_how_likely_each_token_was_is_told_only_where_it_is_asked_for(app: RunningApp) -> None:
    for asked in (True, False):
        options = msgspec.structs.replace(ENGLISH, token_logprobs=asked)
        deltas, transcript = await app.transcribe(wav(noise(20)), options)
        assert transcript.text
        assert bool(transcript.logprobs) == any(delta.logprobs for delta in deltas) == asked


async def test_a_doubtful_text_is_kept_where_somebody_speaks(app: RunningApp) -> None:
    app.answer = lambda submit: say(*words("5"), avg_logprob=-0.9)
    _, transcript = await app.transcribe(wav(speak("5", gap_s=1.0).samples))
    assert transcript.text == "five"


async def test_only_the_segment_in_which_nobody_speaks_is_dropped(app: RunningApp) -> None:
    """Both are in doubt; one is of noise, the other of somebody's words."""
    spoken = speak("12", gap_s=0.2).samples
    sound = np.concatenate([spoken, np.zeros(4 * 16_000 - len(spoken), np.float32), noise(2.0)])
    app.answer = lambda submit: say(t(0), *words("12"), t(2), t(4), *words("9"), t(6), avg_logprob=-0.9)
    for options in (ENGLISH, msgspec.structs.replace(ENGLISH, early_results=True, streams=True)):
        deltas, transcript = await app.transcribe(wav(sound), options)
        assert transcript.text == "".join(delta.text for delta in deltas) == "one two"
        assert [segment.start_s for segment in transcript.segments] == [0.0]
        assert len(transcript.logprobs) == 2


async def test_a_segment_beyond_doubt_is_kept_whatever_the_detector_hears(app: RunningApp) -> None:
    def answer(submit: Submit) -> ChunkResult:
        result = say(t(0), *words("9"), t(2), t(2), *words("12"), t(4), avg_logprob=-0.9)
        return msgspec.structs.replace(result, logprobs=(-0.1,) * 3 + result.logprobs[3:])

    app.answer = answer
    _, transcript = await app.transcribe(wav(noise(4)), ENGLISH)
    assert transcript.text == "nine"


async def test_silence_is_an_empty_text(app: RunningApp) -> None:
    deltas, transcript = await app.transcribe(wav(np.zeros(32_000, np.float32)), DecodingOptions())
    assert (transcript.text, transcript.segments) == ("", ())
    assert all(delta.text == "" for delta in deltas)
    assert transcript.duration_s == 2.0


async def test_what_is_no_audio_raises_what_it_is(app: RunningApp) -> None:
    with pytest.raises(InvalidAudio):
        await app.transcribe(b"this is no audio at all" * 100)


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


async def test_cancelling_a_request_cancels_its_chunks_and_closes_its_recording(app: RunningApp) -> None:
    app.replica.holding = True
    running = asyncio.create_task(app.transcribe(THREE_CHUNKS))
    await until(lambda: len(app.replica.held) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(app.replica.cancelled) == 1
    assert app.dispatcher.num_chunks == 0


async def test_leaving_early_cancels_the_rest(app: RunningApp) -> None:
    app.replica.holding = True
    async with app.transcriber.transcribe(Recording(MemoryFile(THREE_CHUNKS)), ENGLISH):
        await until(lambda: app.replica.held)
    assert app.dispatcher.num_chunks == 0


async def test_a_long_file_is_decoded_only_a_few_chunks_ahead() -> None:
    app = RunningApp(credit=0, workers=1)
    await app.dispatcher.start()
    running = asyncio.create_task(app.transcribe(wav(noise(600))))
    await until(lambda: app.dispatcher.num_chunks >= 2)
    for _ in range(20):  # each waits behind a slice, if there is one
        await app.pool.run(lambda: None)
    assert app.dispatcher.num_chunks <= 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await app.dispatcher.stop()
    app.pool.shutdown()


async def test_a_truncated_recording_is_named_in_the_log(
    app: RunningApp, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _, transcript = await app.transcribe(wav(noise(4))[: 2 * 32_000])
    assert transcript.text == "zero"
    assert "ends early" in caplog.text


async def test_conditioned_on_previous_text_each_chunk_knows_what_was_said_before(app: RunningApp) -> None:
    options = DecodingOptions(language="en", prompt_tokens=words("99"), condition_on_previous_text=True)
    _, transcript = await app.transcribe(THREE_CHUNKS, options)
    assert transcript.text == "zero one two"
    prompts = [submit.options.prompt_tokens for submit in app.replica.submits]
    assert prompts == [words("99"), words("990"), words("9901")]


async def test_without_it_each_chunk_has_the_requests_prompt(app: RunningApp) -> None:
    await app.transcribe(THREE_CHUNKS, DecodingOptions(language="en", prompt_tokens=words("99")))
    assert {submit.options.prompt_tokens for submit in app.replica.submits} == {words("99")}


async def test_a_text_found_at_a_high_temperature_is_no_prompt(app: RunningApp) -> None:
    def unsure_of_the_second(submit: Submit) -> ChunkResult:
        temperature = 0.6 if submit.id.chunk == 1 else 0.4
        return msgspec.structs.replace(number_of_the_chunk(submit), temperature=temperature)

    app.answer = unsure_of_the_second
    await app.transcribe(THREE_CHUNKS, DecodingOptions(language="en", condition_on_previous_text=True))
    assert [submit.options.prompt_tokens for submit in app.replica.submits] == [(), words("0"), ()]


async def test_a_failure_ends_a_conditioned_request_too(app: RunningApp) -> None:
    app.answer = lambda submit: (
        RuntimeError("broken") if submit.id.chunk == 1 else number_of_the_chunk(submit)
    )
    with pytest.raises(ChunkFailed):
        await app.transcribe(THREE_CHUNKS, DecodingOptions(language="en", condition_on_previous_text=True))


def two_channels(*spans: tuple[int, int, int]) -> bytes:
    """75 s of silence, but for noise from a second to another in a channel."""
    samples = np.zeros((75 * 16_000, 2), np.float32)
    for channel, start_s, end_s in spans:
        samples[start_s * 16_000 : end_s * 16_000, channel] = noise(end_s - start_s)
    return wav(samples)


@pytest.mark.parametrize(("texts", "text", "num_read"), [("1", "one", 1), ("  2", "two", 3)])
async def test_channels_are_read_alone_only_where_their_mix_gives_no_text(
    app: RunningApp, texts: str, text: str, num_read: int
) -> None:
    def requests() -> list[str]:
        return list(dict.fromkeys(submit.id.request_id for submit in app.replica.submits))

    app.answer = lambda submit: say(*words(texts[requests().index(submit.id.request_id)].strip()))
    speech = speak("1234").samples
    deltas, transcript = await app.transcribe(wav(np.stack([speech, speech / 2], axis=1)))
    assert "".join(delta.text for delta in deltas) == transcript.text == text
    assert len(requests()) == num_read


async def test_channels_are_transcribed_apart_and_interleaved(app: RunningApp) -> None:
    """The left one in three chunks, the right one in two that begin within the first and the third."""
    source = two_channels((0, 0, 75), (1, 5, 8), (1, 65, 70))

    def twice_where_there_is_time(submit: Submit) -> ChunkResult:
        number = words(str(submit.id.chunk))
        again = (t(20), *number, t(22)) if len(submit.samples) > 22 * 16_000 else ()
        return say(t(0), *number, t(2), *again)

    app.answer = twice_where_there_is_time
    deltas, transcript = await app.transcribe(source, ENGLISH, ("ann", "bob"))
    speakers = [segment.speaker for segment in transcript.segments]
    assert speakers == ["ann", "bob", "ann", "ann", "ann", "ann", "bob"]
    starts_s = [segment.start_s for segment in transcript.segments]
    assert starts_s == sorted(starts_s)
    assert [segment.id for segment in transcript.segments] == list(range(7))
    assert "".join(delta.text for delta in deltas) == transcript.text
    ends_s = [delta.end_s for delta in deltas]
    assert ends_s == sorted(ends_s)
    assert transcript.duration_s == pytest.approx(75.0)


async def test_channels_kept_apart_have_languages_of_their_own(app: RunningApp) -> None:
    """Text that is held back for the other channel keeps its language: Chinese is joined without a space."""
    samples = np.zeros((75 * 16_000, 2), np.float32)
    samples[: 20 * 16_000, 0] = noise(20)
    for start_s in (40, 65):
        samples[start_s * 16_000 : (start_s + 8) * 16_000, 1] = 0.2 * noise(8)

    def is_chinese(submit: Submit) -> bool:
        return float(np.abs(submit.samples).max()) < 0.2

    def answer(submit: Submit) -> ChunkResult:
        text, language = (spell("你好吗"), "zh") if is_chinese(submit) else (words("1"), "en")
        return msgspec.structs.replace(say(t(0), *text, t(1)), language=language)

    app.answer = answer
    app.replica.probabilities_of = lambda submit: {"zh": 0.9 if is_chinese(submit) else 0.1, "en": 0.5}
    options = DecodingOptions(multilingual=True)
    deltas, transcript = await app.transcribe(wav(samples), options, ("ann", "bob"))
    assert (transcript.text, transcript.languages) == ("one你好吗你好吗", ("en", "zh"))
    assert transcript.language == "chinese"
    assert [*dict.fromkeys(delta.language for delta in deltas if delta.text)] == ["en", "zh"]


async def test_a_channel_that_is_silent_does_not_hold_up_the_other(app: RunningApp) -> None:
    app.replica.holding = True
    app.answer = lambda submit: say(t(0), *words(str(submit.id.chunk)), t(2))
    recording = Recording(MemoryFile(two_channels((0, 0, 75))), split_channels=True)
    async with app.transcriber.transcribe(recording, ENGLISH, ("ann", "bob")) as session:
        await until(lambda: len(app.replica.held) >= 2)
        app.replica.release(app.replica.held[0])
        texts = [delta.text async for delta in _until_text(session)]
        assert texts[-1] == "zero"


async def _until_text(session: RequestSession) -> AsyncIterator[TranscriptDelta]:
    async for delta in session:
        yield delta
        if delta.text:
            return


async def test_each_channel_knows_what_was_said_before_in_it(app: RunningApp) -> None:
    options = DecodingOptions(language="en", prompt_tokens=words("99"), condition_on_previous_text=True)
    await app.transcribe(two_channels((0, 0, 75), (1, 0, 75)), options, ("ann", "bob"))
    prompts = [submit.options.prompt_tokens for submit in app.replica.submits]
    assert prompts == [words("99"), words("99"), words("990"), words("991"), words("9902"), words("9913")]


def one_or_two(submit: Submit) -> ChunkResult:
    """A model that hears what comes first, and no more."""
    said = "2" if submit.id.part else "1"
    return say(t(0.3), *words(said), t(0.7))


async def test_speech_that_is_passed_over_behind_a_pause_is_read_again(app: RunningApp) -> None:
    first, pause, second = speak("1").samples, np.zeros(2 * SAMPLE_RATE, np.float32), speak("2").samples
    app.answer = one_or_two
    for options in (ENGLISH, msgspec.structs.replace(ENGLISH, early_results=True, streams=True)):
        deltas, transcript = await app.transcribe(wav(np.concatenate([first, pause, second])), options)
        assert transcript.text == "".join(delta.text for delta in deltas) == "one two"
        begins_s = (len(first) + len(pause)) / SAMPLE_RATE  # with silence of 0.3 s
        assert begins_s - 0.3 < transcript.segments[1].seek / 100 < begins_s + 0.3
        assert transcript.segments[1].start_s == pytest.approx(transcript.segments[1].seek / 100 + 0.3)


@pytest.mark.parametrize(
    "rest", [noise(3.0), np.concatenate([np.zeros(SAMPLE_RATE // 4, np.float32), speak("2").samples])]
)
async def test_neither_noise_nor_what_comes_at_once_is_read_again(app: RunningApp, rest: Samples) -> None:
    app.answer = one_or_two
    _, transcript = await app.transcribe(wav(np.concatenate([speak("1").samples, rest])), ENGLISH)
    assert transcript.text == "one"


async def test_where_a_client_limits_the_tokens_nothing_is_read_again(app: RunningApp) -> None:
    first, pause, second = speak("1").samples, np.zeros(2 * SAMPLE_RATE, np.float32), speak("2").samples
    app.answer = one_or_two
    options = msgspec.structs.replace(ENGLISH, max_new_tokens=10)
    _, transcript = await app.transcribe(wav(np.concatenate([first, pause, second])), options)
    assert transcript.text == "one"
