"""What events and client secrets say where nothing else is given, on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asr_server.api.schemas import ErrorDetail
from asr_server.realtime import server_events as out


def wire(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


ERROR = out.ItemError("server_error", None, "broken", None)


@pytest.mark.parametrize(
    ("event", "is_last"),
    [
        (out.Delta(item_id="a", delta="one"), False),
        (out.SpokenSegment(item_id="a", id="s", speaker="A", start=0.0, end=1.0, text="one"), False),
        (out.Completed(item_id="a", transcript="one", usage=out.DurationUsage(1.5)), True),
        (out.Failed(item_id="a", error=ERROR), True),
    ],
)
def test_events_of_a_text_name_the_first_content_part_and_a_turns_end_is_its_last(
    event: out.ServerEvent, is_last: bool
) -> None:
    body = wire(event)
    assert (body["item_id"], body["content_index"]) == ("a", 0)
    assert body["type"].startswith("conversation.item.input_audio_transcription.")
    assert event.is_last == is_last
    assert not {"languages", "logprobs"} & set(body)


def test_other_events_end_no_item() -> None:
    assert not out.Cleared().is_last
    assert not out.Committed(item_id="a", previous_item_id=None).is_last


def test_an_item_is_a_completed_message_of_audio_that_has_no_transcript_yet() -> None:
    assert wire(out.UserMessage("a")) == {
        "id": "a",
        "type": "message",
        "object": "realtime.item",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_audio", "transcript": None}],
    }


def test_an_error_carries_its_fields_and_the_clients_event() -> None:
    detail = ErrorDetail(message="no", type="invalid_request_error", param="audio", code="bad")
    fields = {"message": "no", "type": "invalid_request_error", "param": "audio", "code": "bad"}
    assert wire(out.error_event(detail, "mine"))["error"] == fields | {"event_id": "mine"}
    assert wire(out.error_event(detail))["error"]["event_id"] is None
    assert wire(out.ItemError.from_detail(detail)) == fields


def test_turn_detection_has_openais_values() -> None:
    """As platform.openai.com/docs/api-reference/realtime lists them; eagerness `auto` is 800 ms here."""
    server = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}
    semantic = server | {"type": "semantic_vad", "silence_duration_ms": 800, "eagerness": "auto"}
    assert wire(out.DEFAULT_VAD) == server | {"idle_timeout_ms": None}
    assert wire(out.SEMANTIC_VAD) == semantic | {"idle_timeout_ms": None}


@pytest.mark.parametrize(("seconds", "is_taken"), [(9, False), (10, True), (7200, True), (7201, False)])
def test_a_secret_lasts_between_ten_seconds_and_two_hours(seconds: int, is_taken: bool) -> None:
    body = msgspec.json.encode({"expires_after": {"seconds": seconds}})
    try:
        wanted = msgspec.json.decode(body, type=out.ClientSecretRequest)
    except msgspec.ValidationError:
        assert not is_taken
    else:
        assert is_taken
        assert wanted.expires_after.seconds == seconds


def test_a_secret_lasts_ten_minutes_where_nothing_is_asked_for() -> None:
    wanted = msgspec.json.decode(b"{}", type=out.ClientSecretRequest)
    assert wire(wanted.expires_after) == {"seconds": 600, "anchor": "created_at"}
