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
from asr_server.realtime.large_events import MAX_AROUND_BYTES, large_append

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
