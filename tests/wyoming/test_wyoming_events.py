"""Events as bytes, by themselves: what is one, and up to which sizes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asr_server.errors import InvalidValue
from tests.wyoming.wyoming_client import Event

from asr_server.wyoming import (  # isort: skip  # the client's module has imported its package in silence
    MAX_LINE_BYTES,
    AudioFormat,
    Transcribe,
    content_of,
    read_event,
)

MAX_DATA_BYTES, MAX_PAYLOAD_BYTES = 1 << 16, 1 << 18


async def read(content: bytes) -> Event | None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    reader.feed_data(content)
    reader.feed_eof()
    return await read_event(reader)


def line(**fields: Any) -> bytes:
    return json.dumps({"type": "x"} | fields).encode() + b"\n"


async def test_an_event_is_a_line_with_further_data_and_a_payload_behind_it() -> None:
    assert await read(line()) == Event("x", {}, None)
    assert await read(line(data={"a": 1})) == Event("x", {"a": 1}, None)
    more = b'{"b": 2}'
    content = line(data={"a": 1, "b": 1}, data_length=len(more), payload_length=3) + more + b"abc"
    assert await read(content) == Event("x", {"a": 1, "b": 2}, b"abc")


@pytest.mark.parametrize(
    "content", [b"", line()[:-1], line(payload_length=4) + b"abc", line(data_length=4) + b"{}"]
)
async def test_a_client_that_leaves_within_an_event_has_left(content: bytes) -> None:
    assert await read(content) is None


@pytest.mark.parametrize(
    "content",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b"\xff\n",
        b'{"type": 1}\n',
        line(data=[]),
        line(data_length=2) + b"[]",
        line(data_length=-1),
        line(payload_length=-1),
        line(data_length=MAX_DATA_BYTES + 1),
        line(payload_length=MAX_PAYLOAD_BYTES + 1),
        line(padding="x" * MAX_LINE_BYTES),
    ],
)
async def test_what_is_no_event_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidValue):
        await read(content)


async def test_the_largest_event() -> None:
    data = b'{"a": "' + b"x" * (MAX_DATA_BYTES - 9) + b'"}'
    content = line(data_length=len(data), payload_length=MAX_PAYLOAD_BYTES) + data + bytes(MAX_PAYLOAD_BYTES)
    event = await read(content)
    assert event is not None
    assert event.payload == bytes(MAX_PAYLOAD_BYTES)
    assert len(event.data["a"]) == MAX_DATA_BYTES - 9


def audio(**changes: int) -> AudioFormat:
    return content_of(
        Event("audio-start", {"rate": 16_000, "width": 2, "channels": 1} | changes), AudioFormat
    )


@pytest.mark.parametrize(
    ("name", "least", "most"), [("rate", 1, 2**31 - 1), ("width", 1, 4), ("channels", 1, 1024)]
)
def test_each_number_of_a_format_has_its_bounds(name: str, least: int, most: int) -> None:
    assert getattr(audio(**{name: least}), name) == least
    assert getattr(audio(**{name: most}), name) == most
    for beyond in (least - 1, most + 1):
        with pytest.raises(InvalidValue, match="The event 'audio-start' is not valid"):
            audio(**{name: beyond})


def test_names_and_terms_are_keywords() -> None:
    assert Transcribe().keywords == ()
    wanted = content_of(
        Event("transcribe", {"transcript_names": ["Anna"], "transcript_terms": ["Ulm"], "more": 1}),
        Transcribe,
    )
    assert wanted.keywords == ("Anna", "Ulm")


def test_the_type_of_a_wrong_event_is_cut() -> None:
    with pytest.raises(InvalidValue) as caught:
        content_of(Event("t" * 81, {}), AudioFormat)
    assert f"The event '{'t' * 80}' is not valid" in caught.value.message
