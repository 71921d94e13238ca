import json

import pytest

from asr_server.api import formats
from asr_server.api.formats import EventWriter
from asr_server.api.schemas import ResponseFormat
from asr_server.core import Passage, Segment, TokenLogprob, Transcript

TEN_FIELDS = {
    "id",
    "seek",
    "start",
    "end",
    "text",
    "tokens",
    "temperature",
    "avg_logprob",
    "compression_ratio",
    "no_speech_prob",
}


def segment(id: int, start_s: float, end_s: float, text: str) -> Segment:
    return Segment(id, 0, start_s, end_s, text, (1, 2), 0.0, -0.1, 1.2, 0.01)


def transcript(*segments: Segment, text: str = "", duration_s: float = 12.3) -> Transcript:
    return Transcript(
        text=text,
        segments=segments,
        logprobs=(TokenLogprob(" one", -0.5, (32, 111, 110, 101)),),
        language="english",
        duration_s=duration_s,
        num_audio_tokens=615,
        num_text_tokens=2,
    )


ONE = transcript(segment(0, 0.5, 2.0, " one"), segment(1, 3661.2341, 3662, " two"), text="one two")
SILENT = transcript()


def test_json_has_text_and_usage_and_nothing_else() -> None:
    body = json.loads(formats.render(ONE, "json"))
    assert body == {"text": "one two", "usage": {"type": "duration", "seconds": 13}}


def test_json_has_logprobs_when_asked_for() -> None:
    body = json.loads(formats.render(ONE, "json", with_logprobs=True))
    assert body["logprobs"] == [{"token": " one", "logprob": -0.5, "bytes": [32, 111, 110, 101]}]


def test_verbose_json_has_every_field_and_no_null() -> None:
    rendered = formats.render(ONE, "verbose_json")
    body = json.loads(rendered)
    assert "null" not in rendered
    assert set(body) == {"task", "language", "duration", "text", "segments", "usage"}
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 12.3)
    assert [set(entry) for entry in body["segments"]] == [TEN_FIELDS, TEN_FIELDS]
    assert body["segments"][1]["start"] == 3661.234


def test_text_is_the_text() -> None:
    assert formats.render(ONE, "text") == "one two"


def test_srt_is_numbered_from_one() -> None:
    assert formats.render(ONE, "srt") == (
        "1\n00:00:00,500 --> 00:00:02,000\none\n\n2\n01:01:01,234 --> 01:01:02,000\ntwo\n\n"
    )


def test_vtt_has_its_header_and_points() -> None:
    assert formats.render(ONE, "vtt") == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:02.000\none\n\n01:01:01.234 --> 01:01:02.000\ntwo\n\n"
    )


def test_silence_is_valid_in_every_format() -> None:
    assert json.loads(formats.render(SILENT, "json"))["text"] == ""
    assert json.loads(formats.render(SILENT, "verbose_json"))["segments"] == []
    assert formats.render(SILENT, "text") == ""
    assert formats.render(SILENT, "srt") == ""
    assert formats.render(SILENT, "vtt") == "WEBVTT\n\n"


def test_no_text_can_break_out_of_its_cue() -> None:
    nasty = transcript(segment(0, 0, 1, " a\n\nb --> <c> & d"))
    assert formats.render(nasty, "srt").splitlines()[2] == "a b -> <c> & d"
    assert formats.render(nasty, "vtt").splitlines()[3] == "a b -&gt; &lt;c&gt; &amp; d"


def test_a_clock_carries_into_the_next_second() -> None:
    assert "00:01:00,000 --> 100:00:00,000" in formats.srt([segment(0, 59.9996, 360_000, "x")])


@pytest.mark.parametrize(
    ("response_format", "media_type"),
    [
        ("json", "application/json"),
        ("verbose_json", "application/json"),
        ("text", "text/plain; charset=utf-8"),
        ("srt", "application/x-subrip; charset=utf-8"),
        ("vtt", "text/vtt; charset=utf-8"),
    ],
)
def test_every_format_says_what_it_is(response_format: ResponseFormat, media_type: str) -> None:
    assert formats.response(ONE, response_format).headers["content-type"] == media_type


def passage(text: str) -> Passage:
    return Passage(text, (), ONE.logprobs, "en", 100, 3)


def parse(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    body: dict[str, object] = json.loads(event.removeprefix(b"data: "))
    return body


def test_a_delta_is_an_event_of_its_type() -> None:
    writer = EventWriter(with_logprobs=False, with_usage=True, with_running_usage=False)
    assert parse(writer.delta(passage("one"))) == {"type": "transcript.text.delta", "delta": "one"}


def test_a_passage_without_text_is_no_event_but_counts() -> None:
    writer = EventWriter(with_logprobs=False, with_usage=True, with_running_usage=False)
    assert writer.delta(passage("")) == b""
    usage = parse(writer.done(ONE))["usage"]
    assert usage == {"type": "tokens", "input_tokens": 100, "output_tokens": 3, "total_tokens": 103}


def test_usage_can_be_left_out_or_run_along() -> None:
    silent = EventWriter(with_logprobs=False, with_usage=False, with_running_usage=False)
    assert set(parse(silent.done(ONE))) == {"type", "text"}
    running = EventWriter(with_logprobs=True, with_usage=True, with_running_usage=True)
    running.delta(passage("one"))
    second = parse(running.delta(passage(" two")))
    assert second["usage"] == {"type": "tokens", "input_tokens": 200, "output_tokens": 6, "total_tokens": 206}
    assert second["logprobs"]
