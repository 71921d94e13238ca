"""Appends of megabytes are decoded in parts; whatever else is as large is refused."""

from __future__ import annotations

import base64
import json
import random

import pytest

from asr_server.api.frames import PIECE_BYTES
from asr_server.api.websockets import LARGE_BYTES
from asr_server.config import MIB
from asr_server.errors import InvalidValue
from asr_server.realtime.client_events import MAX_APPEND_BYTES
from asr_server.realtime.large_events import MAX_AROUND_BYTES, check_begins_append, large_append

SOUND = random.Random(0).randbytes(MIB + 1)
CODED = base64.b64encode(SOUND).decode()
APPEND = {"type": "input_audio_buffer.append", "audio": CODED}


def cut(message: str, size: int = PIECE_BYTES) -> list[bytes]:
    data = message.encode()
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [100, 4099, PIECE_BYTES, 2 * MIB])
@pytest.mark.parametrize(
    "message",
    [
        json.dumps(APPEND | {"event_id": "e"}),
        json.dumps({"event_id": "e", "audio": CODED, "type": "input_audio_buffer.append"}),
        json.dumps({"event_id": 'e","audio":"AAAA'} | APPEND),
        json.dumps(APPEND | {"event_id": "é"}, indent=1, ensure_ascii=False),
        json.dumps(APPEND | {"event_id": "e"}).replace("/", "\\/"),
    ],
    ids=["append", "another order", "an id like a field", "with spaces", "escaped slashes"],
)
def test_an_append_is_read_in_parts(message: str, size: int) -> None:
    events = list(large_append(cut(message, size)))
    assert b"".join(event.audio for event in events) == SOUND
    assert {event.event_id for event in events} == {json.loads(message)["event_id"]}
    assert max(len(event.audio) for event in events) <= max(size, MAX_AROUND_BYTES + size)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "session.update", "session": {"x" * MIB: 1}},
        {"type": "session.update", "session": {"audio": "A" * MIB}},
        {"type": "session.update", "session": {"audio": {"input": {"x" * MIB: 1}}}},
        {"type": "input_audio_buffer.append", "audio": "AAAA", "x" * MIB: 1},
        {"type": "input_audio_buffer.append", "x" * MIB: "AAAA"},
        {"type": "x" * MIB},
        APPEND | {"x": 1},
        APPEND | {"event_id": 1},
        APPEND | {"type": "input_audio_buffer.commit"},
        APPEND | {"audio": "A" * (MAX_APPEND_BYTES // 3 * 4 + 4)},
        ["x" * MIB],
    ],
    ids=lambda event: str(event)[:50],
)
def test_any_other_event_is_refused_before_anything_is_decoded(event: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        next(large_append(cut(json.dumps(event))))
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("wrong", ["\\u0041", "é", "-", "A", "\\", "="])
@pytest.mark.parametrize("at", [8, LARGE_BYTES, len(CODED)])
def test_what_is_no_base64_is_refused_where_it_lies(wrong: str, at: int) -> None:
    message = json.dumps(APPEND).replace(CODED, CODED[:at] + wrong + CODED[at:])
    with pytest.raises(InvalidValue):
        list(large_append(cut(message)))


def test_a_binary_message_is_refused() -> None:
    with pytest.raises(InvalidValue):
        next(large_append([]))


def around(before: int, behind: int) -> str:
    """An append with so many bytes before its audio and so many behind the audio's mark."""
    head, middle = '{"event_id": "', '", "type": "input_audio_buffer.append", "audio": "'
    start = head + "e" * (before - len(head + middle)) + middle
    assert len(start) == before
    return start + CODED[:4000] + '"' + " " * (behind - 1) + "}"


@pytest.mark.parametrize("size", [4096, 100_000])
@pytest.mark.parametrize(
    ("before", "behind", "is_taken"), [(500, 4096, True), (500, 4097, False), (500, 1, True)]
)
def test_little_may_stand_around_the_audio(before: int, behind: int, is_taken: bool, size: int) -> None:
    pieces = cut(around(before, behind), size)
    if is_taken:
        assert b"".join(event.audio for event in large_append(pieces)) == base64.b64decode(CODED[:4000])
    else:
        with pytest.raises(InvalidValue, match="may have more than 524288 bytes"):
            next(large_append(pieces))


@pytest.mark.parametrize(("before", "is_taken"), [(4096, True), (4097, False)])
def test_the_audio_begins_within_the_first_bytes(before: int, is_taken: bool) -> None:
    padded = json.dumps(APPEND).replace('"audio": "', '"audio":' + " " * 5000 + '"')
    place = padded.index('"audio":')
    message = padded[: place + 8] + padded[place + 8 + 5000 - (before - place - 9) :]
    assert message.index(CODED[:50]) == before
    if is_taken:
        check_begins_append(cut(message))
    else:
        with pytest.raises(InvalidValue, match="at most 4096"):
            check_begins_append(cut(message))


@pytest.mark.parametrize(("extra", "is_taken"), [(0, True), (4, False)])
def test_an_append_has_no_more_than_15_mib(extra: int, is_taken: bool) -> None:
    coded = "A" * (15 * MIB // 3 * 4 + extra)
    pieces = cut(json.dumps(APPEND | {"audio": coded}), MIB)
    if is_taken:
        assert sum(len(event.audio) for event in large_append(pieces)) == 15 * MIB
    else:
        with pytest.raises(InvalidValue) as caught:
            next(large_append(pieces))
        assert caught.value.message == f"Invalid event at 'audio': it has more than {15 * MIB} bytes."
        assert caught.value.param == "audio"


def test_what_is_no_base64_is_told_by_the_name_of_its_field() -> None:
    with pytest.raises(InvalidValue, match="it is no base64") as caught:
        list(large_append(cut(json.dumps(APPEND | {"audio": "-" * 8000}))))
    assert caught.value.param == "audio"


@pytest.mark.parametrize("before_the_mark", [0, 1])
def test_audio_may_end_with_a_piece(before_the_mark: int) -> None:
    message = json.dumps(APPEND)
    end = message.index(CODED) + len(CODED) - before_the_mark
    pieces = [message[:end].encode(), message[end:].encode()]
    assert b"".join(event.audio for event in large_append(pieces)) == SOUND
