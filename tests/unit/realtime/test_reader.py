"""How a turn that is under way takes new options, by sessions in front of a fake replica."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from asr_server.annexes.realtime.reader import TurnReader
from asr_server.annexes.realtime.turn_types import ChunkRead, Event, InterimRead, TurnFailed, TurnRead
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples, Segment
from asr_server.errors import EngineUnavailable
from asr_server.transport.messages import Submit
from tests.support.embedded import embedded
from tests.support.fake_replica import noise, say
from tests.support.speech import silence
from tests.support.tokens import words
from tests.support.until import until
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import SECOND, open_manual, say_one

LOGPROBS = ["item.input_audio_transcription.logprobs"]


async def test_log_probabilities_asked_for_before_a_chunk_was_read_come_with_the_turn() -> None:
    async with run_app(embedded(realtime_interim_s=0), say_one) as app, open_manual(app.url) as client:
        await client.append(SECOND)
        await client.send(
            {"type": "session.update", "session": {"type": "transcription", "include": LOGPROBS}}
        )
        await client.until("session.updated")
        await client.commit()
        assert (await client.until(".completed"))[-1]["logprobs"]


# -- One turn by hand --

ITEM = "item_1"
PLAIN = DecodingOptions(language="en")


class Hand:
    """A turn of a session whose events are kept."""

    def __init__(self, app: RunningApp, options: DecodingOptions = PLAIN, speakers: Any = None) -> None:
        self.events: list[Event] = []
        self.tasks: list[asyncio.Task[Any]] = []
        model = app.app.state.server.models.default
        self.reader = TurnReader(ITEM, model, options, self.events.append, self._spawn, speakers)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def ended(self) -> list[Event]:
        await until(lambda: any(isinstance(event, TurnRead | TurnFailed) for event in self.events))
        return self.events


@pytest.mark.parametrize("with_logprobs", [True, False])
async def test_a_turn_reports_chunks_in_order_then_itself(app: RunningApp, with_logprobs: bool) -> None:
    hand = Hand(app, replace(PLAIN, token_logprobs=with_logprobs))
    hand.reader.push(noise(45.0))
    assert len(hand.reader.unread) == 1  # it is read as soon as it is full
    hand.reader.push(noise(5.0))
    assert hand.reader.duration_s == 50.0
    hand.reader.finish()
    first, second, whole = await hand.ended()
    assert isinstance(first, ChunkRead)
    assert isinstance(second, ChunkRead)
    assert isinstance(whole, TurnRead)
    assert (first.item_id, first.text, first.language) == (ITEM, "zero", "en")
    assert (second.text, whole.duration_s, whole.languages, whole.segments) == ("one", 50.0, ("en",), ())
    if with_logprobs:
        assert first.logprobs
        assert second.logprobs
        assert whole.logprobs == first.logprobs + second.logprobs
    else:
        assert (first.logprobs, second.logprobs, whole.logprobs) == (None, None, None)
    assert not hand.reader.unread


async def test_an_interim_reading_is_of_the_growing_chunk_with_the_last_one_as_its_draft(
    app: RunningApp,
) -> None:
    hand = Hand(app, replace(PLAIN, word_timestamps=True, token_logprobs=True))
    hand.reader.push(noise(45.0))
    await until(lambda: hand.events and not app.dispatcher.num_chunks)
    hand.events.clear()
    app.replica.holding = True
    hand.reader.read_interim()
    await until(lambda: app.replica.held)
    (submit,) = app.replica.held
    hand.reader.read_interim()
    assert hand.events == [InterimRead(ITEM)]
    app.replica.release(submit)
    await until(lambda: len(hand.events) == 2)
    interim = hand.events[1]
    assert isinstance(interim, InterimRead)
    assert (interim.chunk, interim.text, interim.language) == (1, "one", "en")
    assert interim.num_samples == 45 * SAMPLE_RATE
    assert len(interim.logprobs or ()) == 1
    app.replica.holding = False
    hand.reader.read_interim()
    await until(lambda: len(hand.events) == 3)
    first, second = app.replica.submits[-2:]
    assert (first.options.draft_tokens, second.options.draft_tokens) == ((), say(*words("1")).tokens)
    hand.reader.cancel()


async def test_interim_readings_wait_for_each_other_and_for_sound(app: RunningApp) -> None:
    hand, other = Hand(app), Hand(app)
    hand.reader.read_interim()
    hand.reader.push(silence(1.0))
    await until(lambda: hand.events == [InterimRead(ITEM)])
    hand.reader.read_interim()
    await until(lambda: hand.events == [InterimRead(ITEM)] * 2)
    app.replica.holding = True
    for each in (hand, other):
        each.reader.push(noise(1.0))
        each.reader.read_interim()
    await until(lambda: app.replica.held)
    assert len(app.replica.submits) == 1
    app.replica.release(app.replica.held[0])
    await until(lambda: len(app.replica.submits) == 2)
    for each in (hand, other):
        each.reader.cancel()


async def test_an_interim_reading_that_fails_says_nothing() -> None:
    async with run_app(answer=lambda _: ValueError("broken")) as app:
        hand = Hand(app)
        hand.reader.push(noise(1.0))
        hand.reader.read_interim()
        await until(lambda: hand.events)
        assert hand.events == [InterimRead(ITEM)]
        hand.reader.cancel()


@pytest.mark.parametrize("ending", ["finish", "read_ahead", "push"])
async def test_what_reads_the_chunk_for_good_ends_its_interim_reading(app: RunningApp, ending: str) -> None:
    hand = Hand(app)
    hand.reader.push(noise(1.0))
    app.replica.holding = True
    hand.reader.read_interim()
    await until(lambda: app.replica.held)
    if ending == "push":
        hand.reader.push(noise(45.0))
    else:
        getattr(hand.reader, ending)()
    assert hand.events == [InterimRead(ITEM)]
    await until(lambda: app.replica.cancelled)
    hand.reader.cancel()


async def reading_ahead(app: RunningApp, duration_s: float = 1.0) -> Hand:
    hand = Hand(app)
    hand.reader.push(noise(duration_s))
    app.replica.holding = True
    hand.reader.read_ahead()
    await until(lambda: app.replica.held)
    return hand


async def test_what_was_read_ahead_is_shown_and_is_the_end_of_the_turn_unless_speech_goes_on(
    app: RunningApp,
) -> None:
    for goes_on in (False, True):
        app.replica.submits.clear()
        hand = await reading_ahead(app)
        if goes_on:
            hand.reader.go_on(is_shown=True)
            hand.reader.push(noise(1.0))
        app.replica.stop_holding()
        await until(lambda: hand.events)
        (shown,) = hand.events
        assert isinstance(shown, InterimRead)
        assert (shown.text, shown.num_samples) == ("zero", SAMPLE_RATE)
        hand.reader.finish()
        await hand.ended()
        assert len(app.replica.submits) == 1 + goes_on
        assert len(app.replica.submits[-1].samples) == SAMPLE_RATE * (1 + goes_on)
        assert app.replica.submits[-1].options.draft_tokens or not goes_on
        assert {each.options.urgency for each in app.replica.submits} == {1}
        assert not hand.reader.unread


async def test_a_passed_pause_is_read_no_more_where_no_interim_reading_is_wanted(app: RunningApp) -> None:
    hand = await reading_ahead(app)
    hand.reader.go_on(is_shown=False)
    await until(lambda: app.replica.cancelled)
    hand.reader.cancel()


@pytest.mark.parametrize("ending", ["finish", "read_ahead", "push"])
async def test_a_passed_pause_is_read_no_more_once_its_chunk_is_read_for_good(
    app: RunningApp, ending: str
) -> None:
    hand = await reading_ahead(app)
    hand.reader.go_on(is_shown=True)
    hand.reader.read_interim()  # it is one already
    assert hand.events == [InterimRead(ITEM)]
    if ending == "push":
        hand.reader.push(noise(45.0))
    else:
        getattr(hand.reader, ending)()
    await until(lambda: app.replica.cancelled and len(app.replica.submits) == 2)
    assert app.replica.submits[-1].options.urgency == (ending != "push")
    hand.reader.cancel()


async def test_a_chunk_that_becomes_full_takes_the_place_of_what_was_read_ahead(app: RunningApp) -> None:
    hand = await reading_ahead(app, 20.0)
    hand.reader.push(noise(25.0))
    await until(lambda: app.replica.cancelled)
    app.replica.stop_holding()
    hand.reader.finish()
    events = await hand.ended()
    assert [event.text for event in events if isinstance(event, ChunkRead)] == ["zero", "one"]


async def test_log_probabilities_stay_as_the_turn_began(app: RunningApp) -> None:
    hand = Hand(app)
    hand.reader.push(noise(45.0))
    hand.reader.set_options(replace(PLAIN, token_logprobs=True, keywords=("one",)))
    hand.reader.finish()
    *_, whole = await hand.ended()
    assert isinstance(whole, TurnRead)
    assert whole.logprobs is None
    keywords = {submit.id.chunk: submit.options.keywords for submit in app.replica.submits}
    assert keywords == {0: (), 1: ("one",)}


async def test_a_chunk_that_fails_fails_its_turn_once_and_what_lies_behind_it_is_not_told() -> None:
    def second_fails(submit: Submit) -> ChunkResult | Exception:
        return ValueError("broken") if submit.id.chunk == 1 else say(*words("7"))

    async with run_app(answer=second_fails) as app:
        hand = Hand(app)
        hand.reader.push(noise(100.0))
        hand.reader.finish()
        first, failed = await hand.ended()
        assert isinstance(first, ChunkRead)
        assert isinstance(failed, TurnFailed)
        assert (failed.item_id, failed.error.type) == (ITEM, "server_error")
        assert "broken" not in failed.error.message


class Speakers:
    """Calls each segment's speaker by its number."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.num_samples = self.num_waits = self.num_closed = 0
        self.labelled: list[Segment] = []

    def push(self, samples: Samples) -> None:
        self.num_samples += len(samples)

    async def wait_for_room(self) -> None:
        self.num_waits += 1

    async def label_turn(self, segments: list[Segment], bytes_of: Any) -> list[Segment]:
        self.labelled += segments
        if self.error:
            raise self.error
        empty = [replace(segments[0], text=" ")]
        named = [replace(each, speaker=str(at)) for at, each in enumerate(segments)]
        return [*empty, *named]

    def close(self) -> None:
        self.num_closed += 1


async def test_segments_of_all_chunks_get_their_speakers_and_empty_ones_are_left_out(app: RunningApp) -> None:
    speakers = Speakers()
    hand = Hand(app, replace(PLAIN), speakers)
    hand.reader.push(noise(45.0))
    hand.reader.finish()
    *_, whole = await hand.ended()
    assert isinstance(whole, TurnRead)
    assert [(each.text.strip(), each.speaker) for each in whole.segments] == [("zero", "0"), ("one", "1")]
    assert whole.segments[0].start_s == speakers.labelled[0].start_s
    assert whole.segments[1].end_s == speakers.labelled[1].end_s > 20
    assert (speakers.num_samples, speakers.num_waits, speakers.num_closed) == (45 * 16_000, 2, 1)


async def test_a_turn_whose_speakers_cannot_be_told_fails(app: RunningApp) -> None:
    speakers = Speakers(EngineUnavailable("x"))
    hand = Hand(app, PLAIN, speakers)
    hand.reader.push(noise(1.0))
    hand.reader.finish()
    failed = (await hand.ended())[-1]
    assert isinstance(failed, TurnFailed)
    assert failed.error.code == "engine_unavailable"
    assert speakers.num_closed == 1


async def test_nobody_is_looked_for_where_nothing_was_said(app: RunningApp) -> None:
    speakers = Speakers(EngineUnavailable("x"))
    hand = Hand(app, PLAIN, speakers)
    hand.reader.push(silence(1.0))
    hand.reader.finish()
    assert await hand.ended() == [TurnRead(ITEM, 1.0)]
