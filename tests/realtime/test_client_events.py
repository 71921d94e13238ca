"""What a client is told of an event that is wrong."""

from __future__ import annotations

import json

import pytest

from asr_server.errors import InvalidValue
from asr_server.realtime.client_events import parse_client_event


def refusal(event: object) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        parse_client_event(json.dumps(event))
    return caught.value


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
