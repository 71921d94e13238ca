"""Events as they are sent: what each tells, in order, as fast as the client reads, and with an end."""

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from asr_server.api.events import EventStream, EventWriter
from asr_server.api.schemas import AudioFields
from asr_server.core import TranscriptDelta
from asr_server.errors import ChunkFailed, InvalidAudio, ShuttingDown
from asr_server.formats.render import RenderOptions
from tests.unit.formats.samples import ONE

LABELLED = tuple(msgspec.structs.replace(segment, speaker="A") for segment in ONE.segments)


def writer_of(options: RenderOptions | None = None, **fields: Any) -> EventWriter:
    asked = AudioFields.model_validate({"model": "whisper-1", "stream": True} | fields)
    return EventWriter(asked, options or RenderOptions())


def delta(text: str) -> TranscriptDelta:
    return TranscriptDelta(text, (), ONE.logprobs, "en", 100, 3, 2.0)


def parse(sent: bytes) -> list[dict[str, Any]]:
    assert sent.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n") if event]


def test_a_delta_without_text_is_no_event_but_counts() -> None:
    writer = writer_of()
    assert writer.delta(delta("")) == b""
    (done,) = parse(writer.done(ONE))
    assert done["usage"] == {"type": "tokens", "input_tokens": 100, "output_tokens": 3, "total_tokens": 103}


def test_usage_can_be_left_out_or_run_along() -> None:
    (done,) = parse(writer_of(stream_include_usage=False).done(ONE))
    assert set(done) == {"type", "text", "languages"}
    running = writer_of(RenderOptions(with_logprobs=True), stream_continuous_usage_stats=True)
    running.delta(delta("one"))
    (second,) = parse(running.delta(delta(" two")))
    assert second["usage"] == {"type": "tokens", "input_tokens": 200, "output_tokens": 6, "total_tokens": 206}
    assert second["logprobs"]


@pytest.mark.parametrize("channels", ["mix", "split"])
def test_usage_runs_along_on_segments_too(channels: str) -> None:
    asked = {"response_format": "diarized_json", "channels": channels}
    writer = writer_of(None, stream_continuous_usage_stats=True, **asked)
    sent = writer.delta(msgspec.structs.replace(delta("one"), segments=LABELLED))
    events = parse(sent + writer.done(msgspec.structs.replace(ONE, segments=LABELLED)))
    assert {event["type"] for event in events} > {"transcript.text.segment"}
    assert all(event["usage"] == events[0]["usage"] for event in events)


def test_segments_come_before_the_end_where_voices_are_told_apart_and_in_it_where_asked_for() -> None:
    def kinds(**fields: str) -> list[str]:
        done = writer_of(None, response_format="diarized_json", **fields).done(labelled)
        return [event["type"] for event in parse(done)]

    labelled = msgspec.structs.replace(ONE, segments=LABELLED)
    assert kinds() == [*["transcript.text.segment"] * len(LABELLED), "transcript.text.done"]
    assert kinds(channels="split") == ["transcript.text.done"]
    (plain,) = parse(writer_of().done(ONE))
    assert not {"segments", "language", "duration", "words", "truncated"} & plain.keys()
    (whole,) = parse(writer_of(stream_include_segments=True).done(ONE))
    assert [segment["text"] for segment in whole["segments"]] == [each.text for each in ONE.segments]
    assert (whole["language"], whole["duration"]) == (ONE.language, ONE.duration_s)


# -- The stream ----------------------------------------------------------------------------------------------


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Reader:
    """A client that takes what is sent once it may."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def send(self, message: Message) -> None:
        await self.may_read.wait()
        self.sent.append(message)

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message.get("more_body", False)) for message in self.sent[1:]]


async def test_a_stream_begins_with_its_first_event_and_ends_with_an_empty_one() -> None:
    reader = Reader()
    stream = EventStream(reader.send, {"x-own": "1"})
    await settle()
    assert not stream.has_begun
    stream.write(b"")
    await settle()
    assert stream.has_begun
    assert reader.bodies == []
    head = reader.sent[0]
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-own": b"1",
    }
    stream.write(b"one")
    await settle()
    stream.write(b"two")
    await settle()
    await stream.end()
    assert reader.bodies == [(b"one", True), (b"two", True), (b"", False)]


async def test_a_slow_reader_holds_up_no_writer() -> None:
    reader = Reader()
    stream = EventStream(reader.send, {})
    stream.write(b"one")
    await settle()
    reader.may_read.clear()
    for text in (b"two", b"three", b"four"):
        stream.write(text)
        await settle()
    ending = asyncio.create_task(stream.end())
    await settle()
    assert not ending.done()
    reader.may_read.set()
    await ending
    assert reader.bodies == [*((text, True) for text in (b"one", b"two", b"three", b"four")), (b"", False)]


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (InvalidAudio("no audio"), True),
        (ShuttingDown(), True),
        (ChunkFailed("no numbers"), True),
        (ZeroDivisionError("secret"), False),
    ],
)
async def test_an_error_within_a_stream_is_its_event_and_a_line(
    error: Exception, is_expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Reader()
    stream = EventStream(reader.send, {})
    stream.fail(error)
    await stream.end()
    (text, _), (_, more) = reader.bodies
    assert not more
    body = json.loads(text.removeprefix(b"data: "))
    assert {"message", "type", "param", "code"} == set(body["error"])
    assert ("secret" in body["error"]["message"]) is False
    (line,) = caplog.records
    assert (line.levelno, line.exc_info is None) == (logging.WARNING, is_expected)
    assert line.getMessage() == f"a stream has failed: {error!r}"
