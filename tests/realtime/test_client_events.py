"""What a client is told of an event that is wrong."""

from __future__ import annotations

import json
import re

import pytest

from asr_server.config import MIB
from asr_server.errors import InvalidValue
from asr_server.realtime import client_events
from asr_server.realtime.client_events import parse_client_event


def refusal(event: object) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        parse_client_event(json.dumps(event))
    return caught.value


@pytest.mark.parametrize(
    "event",
    [
        {"type": "session.update", "session": {"x" * 3 * MIB: 1}},
        {"type": "session.update", "session": {"` - at `$." * (MIB // 4): 1}},
        {"type": "session.update", "session": {"x" * 20 * MIB: 1}},
        {"type": "input_audio_buffer.append", "audio": "AAAA", "x" * 20 * MIB: "x" * 21 * MIB},
        {"type": "x" * 20 * MIB},
        {"type": "input_audio_buffer.commit", "event_id": "x" * 20 * MIB},
    ],
    ids=["name", "name like a path", "long name", "name beside audio", "type", "id"],
)
def test_a_name_of_any_length_comes_back_cut(
    event: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(client_events, "_PATH", Recorder(client_events._PATH, texts))
    error = refusal(event)
    assert len(error.message) <= 2000
    assert len(error.param or "") <= 200
    assert all(len(text) < 1000 for text in texts)


class Recorder:
    """A pattern, and what it was matched with."""

    def __init__(self, pattern: re.Pattern[str], texts: list[str]) -> None:
        self._pattern, self._texts = pattern, texts

    def fullmatch(self, text: str) -> re.Match[str] | None:
        self._texts.append(text)
        return self._pattern.fullmatch(text)


def update(**input_fields: object) -> object:
    return {"type": "session.update", "session": {"audio": {"input": input_fields}}}


@pytest.mark.parametrize(
    ("event", "param", "said"),
    [
        (update(format={"type": "audio/pcm", "rate": 16000}), "format.rate", "24000 samples a second"),
        (update(format={"type": "audio/opus"}), "format.type", "'audio/pcmu'"),
        (update(turn_detection={"type": "clever_vad"}), "turn_detection.type", "'semantic_vad'"),
        (update(turn_detection={"threshold": 2}), "turn_detection.threshold", "<= 1"),
        (update(rate=1), "input.rate", "unknown parameter"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type", "'transcription'"),
        ({"type": "session.update"}, "session", "required"),
        ({"type": "input_audio_buffer.append"}, "audio", "required"),
        ({"type": "response.create"}, "type", "this server transcribes"),
        ({}, "type", "required"),
    ],
)
def test_the_field_at_fault_is_named_and_what_it_can_be(event: object, param: str, said: str) -> None:
    error = refusal(event)
    assert (error.param or "").endswith(param)
    assert said in error.message
