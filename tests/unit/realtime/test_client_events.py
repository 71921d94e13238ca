"""What a client is told of an event that is wrong."""

import base64
import json
import re

import msgspec
import pytest

from asr_server.annexes.realtime import client_events
from asr_server.annexes.realtime.client_events import (
    MAX_MESSAGE_BYTES,
    AppendAudio,
    OldSessionFields,
    OldSessionUpdate,
    SessionUpdate,
    event_id_of,
    parse_client_event,
)
from asr_server.config import MIB
from asr_server.errors import InvalidValue


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
def test_a_long_name_comes_back_cut(event: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
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


def append(num_bytes: int) -> str:
    coded = base64.b64encode(bytes(num_bytes)).decode()
    return f'{{"type":"input_audio_buffer.append","audio":"{coded}"}}'


def test_an_append_has_at_most_3_mib_and_fits_into_a_message() -> None:
    message = append(3 * MIB)
    assert len(message) <= MAX_MESSAGE_BYTES
    event = parse_client_event(message)
    assert isinstance(event, AppendAudio)
    assert len(event.audio) == 3 * MIB
    with pytest.raises(InvalidValue) as caught:
        parse_client_event(append(3 * MIB + 1))
    assert caught.value.param == "audio"


@pytest.mark.parametrize(
    ("name", "most", "more"),
    [
        ("prompt", "x" * 65_536, "x" * 65_537),
        ("language", "x" * 65_536, "x" * 65_537),
        ("keywords", ["x" * 1024] * 1024, ["x"] * 1025),
        ("languages", ["x" * 1024], ["x" * 1025]),
    ],
)
def test_texts_and_lists_of_a_session_are_bounded(name: str, most: object, more: object) -> None:
    event = parse_client_event(json.dumps(update(transcription={name: most})))
    assert isinstance(event, SessionUpdate)
    assert (refusal(update(transcription={name: more})).param or "").startswith(
        f"session.audio.input.transcription.{name}"
    )


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        *(("threshold", 0, 1), ("prefix_padding_ms", 0, 5000), ("silence_duration_ms", 20, 10_000)),
        ("idle_timeout_ms", 1000, 600_000),
    ],
)
def test_a_value_of_turn_detection_lies_between_its_bounds(name: str, least: int, most: int) -> None:
    for value in (least, most, None):
        assert isinstance(parse_client_event(json.dumps(update(turn_detection={name: value}))), SessionUpdate)
    for value in (least - 1, most + 1):
        assert refusal(update(turn_detection={name: value})).param == (
            f"session.audio.input.turn_detection.{name}"
        )


def test_an_events_id_has_at_most_512_characters_and_is_found_in_an_event_that_is_wrong() -> None:
    commit = {"type": "input_audio_buffer.commit"}
    event = parse_client_event(json.dumps(commit | {"event_id": "x" * 512}))
    assert event.event_id == "x" * 512
    assert refusal(commit | {"event_id": "x" * 513}).param == "event_id"
    assert parse_client_event(json.dumps(commit)).event_id is None
    for wrong, id in (({"event_id": "x" * 600}, "x" * 512), ({"event_id": 1}, None), ([], None)):
        assert event_id_of(json.dumps(wrong)) == id
    assert event_id_of('{"event_id":') is None


@pytest.mark.parametrize(
    ("format", "name"), [("pcm16", "audio/pcm"), ("g711_ulaw", "audio/pcmu"), ("g711_alaw", "audio/pcma")]
)
def test_the_old_words_of_a_session_mean_todays(format: str, name: str) -> None:
    vad = {"type": "server_vad", "threshold": 0.3}
    old = {"input_audio_format": format, "turn_detection": vad, "include": None}
    event = parse_client_event(json.dumps({"type": "transcription_session.update", "session": old}))
    assert isinstance(event, OldSessionUpdate)
    today = msgspec.to_builtins(event.session.renamed())
    assert today["audio"]["input"]["format"]["type"] == name
    assert today["audio"]["input"]["turn_detection"] == vad
    assert (today["include"], "transcription" in today["audio"]["input"]) == (None, False)
    bare = msgspec.to_builtins(OldSessionFields().renamed())
    assert bare == {"type": "transcription", "audio": {"input": {}}}
