"""Text that is sent while its chunk is still being read; and a request in which nothing moves."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import numpy as np
import pytest

from asr_server.api.errors import response_to
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import PreprocessPool, Recording
from asr_server.checkpoint.sizes import read_window
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples, Segment
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.errors import RequestStalled
from asr_server.metrics import REGISTRY
from asr_server.transcription.progress import MAX_STEPS_IN_FLIGHT, ChunkProgress, StallLimits
from asr_server.transcription.transcriber import Transcriber, Transcription
from asr_server.transport.messages import Command, EarlyResult, Event, Heartbeat, Submit
from harness.clips import make_clip
from tests.support.checkpoints import fragmentary_directory
from tests.support.embedded import embedded
from tests.support.fake_replica import FakeReplica, noise, say, wav
from tests.support.memory_file import MemoryFile
from tests.support.speech import say as digits
from tests.support.speech import silence
from tests.support.tokens import TOKENIZER, make_tokenizer, t, words
from tests.unit.transcription.parts import timed

STREAMED = DecodingOptions(language="en", early_results=True, streams=True)
LENIENT = DecodingOptions(language="de", logprob_threshold=-9.0, compression_ratio_threshold=9.0)


# -- With a real engine --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_deltas_joined_are_the_text_whatever_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random checkpoint under random thresholds: parts fail the ladder with segments already sent."""
    num_kept = 0
    keep = ActiveChunk.keep_early_result

    def counted(self: ActiveChunk, result: ChunkResult) -> ChunkResult:
        nonlocal num_kept
        kept = keep(self, result)
        num_kept += kept is not result
        return kept

    monkeypatch.setattr(ActiveChunk, "keep_early_result", counted)
    rng, num_early, temperatures = random.Random(1), 0, set[float]()
    async with RealTranscriber() as transcriber:
        for number in range(5):
            options = DecodingOptions(
                language="de",
                early_results=True,
                streams=True,
                temperatures=(0.0, 0.3, 0.6)[: rng.randint(1, 3)],
                logprob_threshold=rng.uniform(-4.9, -4.3),
                compression_ratio_threshold=rng.choice([0.5, 0.8, 2.4]),
                no_speech_threshold=rng.choice([-1.0, 0.6]),
                seed=number,
            )
            async with transcriber.run(number, options) as transcription:
                deltas = [delta async for delta in transcription]
                transcript = await transcription.transcript()
            assert "".join(delta.text for delta in deltas) == transcript.text
            assert sum(delta.num_text_tokens for delta in deltas) == transcript.num_text_tokens
            assert sum(delta.num_audio_tokens for delta in deltas) == transcript.num_audio_tokens
            assert all(delta.num_audio_tokens >= 0 for delta in deltas)
            assert transcript.text == " ".join(segment.text.strip() for segment in transcript.segments)
            num_early += sum(bool(delta.text and not delta.segments) for delta in deltas)
            temperatures |= {segment.temperature for segment in transcript.segments}
    assert num_early > 0, "some text must have come before its chunk was read"
    assert num_kept > 0, "some parts must have failed with segments already sent"
    assert len(temperatures) > 1, "some parts must have climbed the ladder"


@pytest.mark.slow
async def test_a_request_that_streams_says_what_one_that_does_not_says_whatever_the_ladder_rejects() -> None:
    async with RealTranscriber() as transcriber:
        for threshold in (-4.9, -4.3):
            segments = []
            for streams in (False, True):
                options = msgspec.structs.replace(
                    LENIENT, early_results=True, streams=streams, logprob_threshold=threshold
                )
                async with transcriber.run(3, options) as transcription:
                    [delta async for delta in transcription]
                    segments.append((await transcription.transcript()).segments)
            assert segments[0] == segments[1]


class RealTranscriber:
    """Through the server's own pipeline, without HTTP."""

    def __init__(self) -> None:
        checkpoint = fragmentary_directory()
        # Its text is so unlikely that a beam search would read all of it again.
        settings = Settings(model=str(checkpoint), executor="inline", dtype="float32", beam_size=1)
        window = read_window(checkpoint)
        self._limits = AudioLimits.from_settings(settings, window)
        self._dispatcher, self._pool = Dispatcher(settings, window=window), PreprocessPool(1)
        self._transcriber = Transcriber(
            self._dispatcher, self._pool, Tokenizer.from_directory(checkpoint), check_voice=False
        )

    async def __aenter__(self) -> RealTranscriber:
        await self._dispatcher.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._dispatcher.stop()
        await asyncio.to_thread(self._pool.shutdown)

    def run(self, clip: int, options: DecodingOptions) -> AbstractAsyncContextManager[Transcription]:
        recording = Recording(MemoryFile(wav(make_clip(clip, 4.0))), self._limits)
        return self._transcriber.run(recording, options)


# -- With a replica that says what the test wants ------------------------------------------------------------


TWO_SECONDS = noise(2.0)


class EarlyReplica(FakeReplica):
    """Reports `early` before it answers."""

    early: ChunkResult | None = None

    def report(self, submit: Submit) -> None:
        assert self.early is not None
        self._events.put_nowait(EarlyResult(submit.id, self.early))


class App:
    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.num_audio_tokens: list[int] = []  # of each delta
        self.answers = [say(t(0), *words("0"), t(1), t(1), *words("1"), t(2))]
        self.replica = EarlyReplica(lambda submit: self.answers.pop(0))
        self.replica.early = say(t(0), *words("0"), t(1), finish_reason="length")
        self.replica.holding = True
        self.dispatcher = Dispatcher(embedded(), lambda _: self.replica)
        self.pool = PreprocessPool(1)
        self.transcriber = Transcriber(self.dispatcher, self.pool, TOKENIZER)

    async def texts(
        self, is_sent_early: bool = True, options: DecodingOptions = STREAMED, sound: Samples = TWO_SECONDS
    ) -> list[str]:
        """The deltas of the sound, of which the first second is read early."""
        async with self.transcriber.run(Recording(MemoryFile(wav(sound))), options) as transcription:
            deltas = aiter(transcription)
            submit = await self.next_submit()
            self.replica.report(submit)
            sent = [await anext(deltas)] if is_sent_early else []
            self.replica.holding = False
            self.replica.release(submit)
            sent += [delta async for delta in deltas]
            texts = [delta.text for delta in sent]
            self.num_audio_tokens = [delta.num_audio_tokens for delta in sent]
            self.segments = (await transcription.transcript()).segments
            assert "".join(texts) == (await transcription.transcript()).text
            return texts

    async def next_submit(self) -> Submit:
        async with asyncio.timeout(60):
            while not self.replica.held:
                await asyncio.sleep(0.001)
        return self.replica.held[0]


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App()
    await app.dispatcher.start()
    yield app
    await app.dispatcher.stop()
    app.pool.shutdown()


async def test_a_closed_segment_is_sent_while_its_chunk_is_being_read(app: App) -> None:
    assert await app.texts() == ["zero", " one"]


async def test_what_another_replica_reads_differently_takes_nothing_back(app: App) -> None:
    differently = say(t(0), *words("77"), t(2))
    rest = say(t(0), *words("5"), t(1))
    app.answers = [differently, rest]
    assert await app.texts() == ["zero", " five"]
    first, second = app.replica.submits
    assert (first.id.part, second.id.part) == (0, 1)
    assert len(second.samples) == 16_000  # from the end of what had been sent


def num_guessed() -> float:
    """How many words have times by their letters, since the process began."""
    return REGISTRY.get_sample_value("asr_words_guessed_total") or 0.0


WITH_WORDS = msgspec.structs.replace(STREAMED, word_timestamps=True)


async def test_words_of_what_was_sent_have_the_times_of_the_result_judged_silence(app: App) -> None:
    silence = say(*(t(0), *words("0"), t(1), t(1), *words("1"), t(2)), avg_logprob=-2.0, no_speech_prob=0.9)
    timed = msgspec.structs.replace(
        silence, token_times_s=(0.2, 0.7, 1.8), token_onsets_s=(0.4, 1.2), token_focus=(0.5, 0.6)
    )
    app.answers = [timed, say()]
    num_before = num_guessed()
    assert await app.texts(options=WITH_WORDS) == ["zero", ""]
    assert num_guessed() == num_before
    (word,) = app.segments[0].words
    assert (word.text, word.start_s, word.end_s) == (" zero", 0.2, 0.7)


async def test_no_time_is_guessed_for_a_full_text_that_shows_none_and_is_judged_silence(app: App) -> None:
    silence = say(*(t(0), *words("0"), t(1), t(1), *words("1"), t(2)), avg_logprob=-2.0, no_speech_prob=0.9)
    app.answers = [msgspec.structs.replace(silence, is_full=True), say()]
    num_before = num_guessed()
    assert await app.texts(options=msgspec.structs.replace(STREAMED, text_only=True)) == ["zero", ""]
    assert num_guessed() == num_before


async def test_doubtful_text_is_sent_early_where_somebody_surely_speaks(app: App) -> None:
    """A model may give all of a clean recording a no-speech probability above the bound of doubt."""
    app.replica.early = say(t(0), *words("31415"), t(3), finish_reason="length", no_speech_prob=0.5)
    sound = digits("31415926").samples
    end_s = len(sound) / SAMPLE_RATE
    app.answers = [say(t(0), *words("31415"), t(3), t(3), *words("926"), t(end_s), no_speech_prob=0.5)]
    assert await app.texts(sound=sound) == ["three one four one five", " nine two six"]


async def test_text_that_may_leave_out_a_sentence_waits_for_its_chunk(app: App) -> None:
    """Sent early it would stand, and what is missing before it could not be read again."""
    lost, pause, read = digits("314159", "rms", lead_s=0.1), silence(1.5), digits("2718", "rms", lead_s=0.1)
    sound = np.concatenate([lost.samples, pause, read.samples])
    first_s = len(lost.samples) / SAMPLE_RATE
    second_s, duration_s = (len(lost.samples) + len(pause)) / SAMPLE_RATE, len(sound) / SAMPLE_RATE
    second = timed(words("2718"), second_s, duration_s - 0.3, duration_s)
    app.replica.early = msgspec.structs.replace(second, finish_reason="length")
    app.answers = [second, timed(words("314159"), 0.1, first_s, first_s + 0.5)]
    rest_s = 0.75 + len(read.samples) / SAMPLE_RATE
    app.answers.append(timed(words("2718"), 0.75, rest_s, rest_s))
    texts = await app.texts(is_sent_early=False, sound=sound)
    assert texts == ["three one four one five nine two seven one eight"]


async def test_what_was_sent_stands_when_the_rest_of_its_chunk_is_read_in_one_piece(app: App) -> None:
    first, second = digits("1").samples, digits("2").samples
    spoken_s = len(first) / SAMPLE_RATE
    app.replica.early = say(t(0.1), *words("1"), t(spoken_s), finish_reason="length")
    in_noise = say(t(spoken_s + 0.3), *words("937"), t(spoken_s + 0.9), avg_logprob=-0.9, no_speech_prob=0.6)
    piece = msgspec.structs.replace(
        in_noise,
        tokens=app.replica.early.tokens + in_noise.tokens,
        logprobs=app.replica.early.logprobs + in_noise.logprobs,
    )
    app.answers = [piece, say(t(0.3), *words("2"), t(0.7)), say(t(0), *words("37373739"), t(3))]
    sound = np.concatenate([first, noise(6.0), second])
    assert await app.texts(sound=sound) == ["one", " three seven three seven three seven three nine", " two"]
    uncut_s = len(app.replica.submits[2].samples) / SAMPLE_RATE
    assert uncut_s == pytest.approx(3.0, abs=0.3), "to the middle of what lies between the two"


async def test_while_the_language_is_not_settled_text_waits_for_its_chunk(app: App) -> None:
    """The vote of several chunks may have it read again in another language."""
    options = msgspec.structs.replace(STREAMED, language=None)
    async with app.transcriber.run(Recording(MemoryFile(wav(noise(2.0)))), options) as transcription:
        submit = await app.next_submit()
        app.replica.probabilities = {"en": 0.6, "de": 0.4}
        app.replica.report(submit)
        app.replica.release(submit)
        assert [delta.text async for delta in transcription] == ["zero one"]


async def test_the_first_text_is_not_held_up_by_the_encoding_of_more(app: App) -> None:
    app.replica.early = say(t(0), *words("0"), t(5), finish_reason="length")
    async with app.transcriber.run(Recording(MemoryFile(wav(noise(75.0)))), STREAMED) as transcription:
        submit = await app.next_submit()
        await asyncio.sleep(0.2)
        assert len(app.replica.submits) == 1
        app.replica.report(submit)
        assert (await anext(aiter(transcription))).text == "zero"
        async with asyncio.timeout(60):
            while len(app.replica.submits) < 2:
                await asyncio.sleep(0.001)


ENGLISH = DecodingOptions(language="en")
IN_DOUBT = {"de": 0.4, "en": 0.3, "zh": 0.3}


class BusyReplica(FakeReplica):
    """Keeps whatever it is sent, and steps on."""

    beat_s = 0.1

    def send(self, command: Command) -> None:
        self.holding = True
        super().send(command)

    async def receive(self) -> list[Event]:
        return [
            Heartbeat(num_steps=event.num_steps * MAX_STEPS_IN_FLIGHT)
            if isinstance(event, Heartbeat)
            else event
            for event in await super().receive()
        ]


@asynccontextmanager
async def transcriber(replica: FakeReplica, limits: StallLimits) -> AsyncIterator[Transcriber]:
    dispatcher, pool = Dispatcher(embedded(), lambda _: replica), PreprocessPool(1)
    await dispatcher.start()
    try:
        yield Transcriber(dispatcher, pool, make_tokenizer(), stall_limits=limits)
    finally:
        await dispatcher.stop()
        await asyncio.to_thread(pool.shutdown)


async def read(app: Transcriber, options: DecodingOptions = ENGLISH) -> str:
    async with app.run(Recording(MemoryFile(wav(noise(75)))), options) as transcription:
        return "".join([delta.text async for delta in transcription])


def num_stalled() -> float:
    return REGISTRY.get_sample_value("asr_requests_stalled_total") or 0.0


async def test_tasks_that_wait_for_each_other_end_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a stream in a doubtful language did: its first chunk waited for the votes of chunks that waited
    for its text.
    """
    monkeypatch.setattr(ChunkProgress, "on_wait_for_others", lambda self: None)
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.probabilities = IN_DOUBT
    before = num_stalled()
    async with transcriber(replica, StallLimits(request_s=0.2)) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="nothing of it has moved"):
            await read(app, DecodingOptions(early_results=True, streams=True))
    assert num_stalled() == before + 1
    assert "the request is ended: nothing of it has moved" in caplog.text


@pytest.mark.slow
async def test_a_chunk_that_its_replica_never_finishes_ends_the_request() -> None:
    async with transcriber(BusyReplica(lambda submit: say()), StallLimits()) as app, asyncio.timeout(60):
        with pytest.raises(RequestStalled, match="steps without finishing"):
            await read(app)


async def test_a_pool_that_finishes_nothing_ends_the_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    release = threading.Event()
    async with transcriber(replica, StallLimits(request_s=0.1, pool_s=0.2)) as app, asyncio.timeout(60):
        stuck = asyncio.create_task(app.pool.run(release.wait))
        try:
            with pytest.raises(RequestStalled, match="threads that decode"):
                await read(app)
        finally:
            release.set()
            await stuck


@pytest.mark.slow
async def test_a_request_that_waits_for_its_turn_is_not_ended() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    replica.holding = True
    async with transcriber(replica, StallLimits(request_s=0.5)) as app, asyncio.timeout(60):
        running = asyncio.create_task(read(app))
        await asyncio.wait([running], timeout=2.0)
        assert not running.done()
        replica.stop_holding()
        assert await running


@pytest.mark.slow
async def test_a_client_that_reads_slowly_does_not_end_its_request() -> None:
    replica = FakeReplica(lambda submit: say(*words("1")))
    async with (
        asyncio.timeout(60),
        transcriber(replica, StallLimits(request_s=0.5)) as app,
        app.run(Recording(MemoryFile(wav(noise(75)))), ENGLISH) as transcription,
    ):
        deltas = aiter(transcription)
        first = await anext(deltas)
        await asyncio.sleep(2.0)  # four times the limit
        assert first.text + "".join([delta.text async for delta in deltas])


def test_the_error_says_what_happened_in_openais_body() -> None:
    response = response_to(RequestStalled("It came to a standstill."))
    assert response.status_code == 500
    assert b'"code":"request_stalled"' in response.body
