import json

import msgspec
import pytest

from asr_server.api.events import EventWriter
from asr_server.api.schemas import AudioFields
from asr_server.core import TranscriptDelta
from asr_server.formats.render import RenderOptions
from tests.unit.formats.samples import ONE

FIELDS = AudioFields.model_validate({"model": "whisper-1", "stream": True})


def delta(text: str) -> TranscriptDelta:
    return TranscriptDelta(text, (), ONE.logprobs, "en", 100, 3, 2.0)


def parse(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    body: dict[str, object] = json.loads(event.removeprefix(b"data: "))
    return body


def test_a_delta_without_text_is_no_event_but_counts() -> None:
    writer = EventWriter(FIELDS)
    assert writer.delta(delta("")) == b""
    usage = parse(writer.done(ONE))["usage"]
    assert usage == {"type": "tokens", "input_tokens": 100, "output_tokens": 3, "total_tokens": 103}


def test_usage_can_be_left_out_or_run_along() -> None:
    silent = EventWriter(FIELDS.model_copy(update={"stream_include_usage": False}))
    assert set(parse(silent.done(ONE))) == {"type", "text", "languages"}
    along = FIELDS.model_copy(update={"stream_continuous_usage_stats": True})
    running = EventWriter(along, RenderOptions(with_logprobs=True))
    running.delta(delta("one"))
    second = parse(running.delta(delta(" two")))
    assert second["usage"] == {"type": "tokens", "input_tokens": 200, "output_tokens": 6, "total_tokens": 206}
    assert second["logprobs"]


@pytest.mark.parametrize("channels", ["mix", "split"])
def test_usage_runs_along_on_segments_too(channels: str) -> None:
    changed = {
        "stream_continuous_usage_stats": True,
        "response_format": "diarized_json",
        "channels": channels,
    }
    writer = EventWriter(FIELDS.model_copy(update=changed))
    transcript = msgspec.structs.replace(
        ONE, segments=tuple(msgspec.structs.replace(segment, speaker="A") for segment in ONE.segments)
    )
    sent = writer.delta(msgspec.structs.replace(delta("one"), segments=transcript.segments))
    events = [parse(line + b"\n\n") for line in (sent + writer.done(transcript)).split(b"\n\n") if line]
    assert {event["type"] for event in events} > {"transcript.text.segment"}
    assert all(event["usage"] == events[0]["usage"] for event in events)
