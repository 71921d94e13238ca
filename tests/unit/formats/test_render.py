import json

import msgspec

from asr_server.core import DroppedSegment, Track, Transcript, Word
from asr_server.formats.render import RenderOptions, json_body, render
from asr_server.formats.subtitles import srt
from tests.unit.formats.samples import ONE, segment, transcript

TEN_FIELDS = {
    *("id", "seek", "start", "end", "text", "tokens"),
    *("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"),
}


def test_json_has_text_languages_and_usage_and_nothing_else() -> None:
    body = json.loads(render(ONE, "json"))
    assert body == {
        "text": "one two",
        "languages": [{"code": "en"}],
        "usage": {"type": "duration", "seconds": 13},
    }


def test_json_has_logprobs_when_asked_for() -> None:
    assert json_body(ONE).logprobs is None
    body = json.loads(render(ONE, "json", RenderOptions(with_logprobs=True)))
    assert body["logprobs"] == [{"token": " one", "logprob": -0.5, "bytes": [32, 111, 110, 101]}]


def test_verbose_json_has_every_field_and_no_null() -> None:
    rendered = render(ONE, "verbose_json")
    body = json.loads(rendered)
    assert "null" not in rendered
    assert set(body) == {"task", "language", "duration", "text", "segments", "usage"}
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 12.3)
    assert [set(entry) for entry in body["segments"]] == [TEN_FIELDS, TEN_FIELDS]
    assert body["segments"][1]["start"] == 3661.234


def test_text_srt_and_vtt_are_as_they_are_known() -> None:
    assert render(ONE, "text") == "one two"
    assert render(ONE, "srt") == (
        "1\n00:00:00,500 --> 00:00:02,000\none\n\n2\n01:01:01,234 --> 01:01:02,000\ntwo\n\n"
    )
    assert render(ONE, "vtt") == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:02.000\none\n\n01:01:01.234 --> 01:01:02.000\ntwo\n\n"
    )


def test_no_text_can_break_out_of_its_cue() -> None:
    nasty = transcript(segment(0, 0, 1, " a\n\nb --> <c> & d"))
    assert render(nasty, "srt").splitlines()[2] == "a b -> <c> & d"
    assert render(nasty, "vtt").splitlines()[3] == "a b -&gt; &lt;c&gt; &amp; d"


def test_a_clock_carries_into_the_next_second() -> None:
    assert "00:01:00,000 --> 100:00:00,000" in srt([segment(0, 59.9996, 360_000, "x")])


def test_words_come_in_the_order_of_the_text() -> None:
    words = (Word(" one", 1.0, 1.2), Word(" two", 0.9, 1.1))
    said = msgspec.structs.replace(segment(0, 0.9, 1.2, " one two"), words=words)
    assert verbose_words(transcript(said)) == ["one", "two"]
    speakers = [
        msgspec.structs.replace(segment(0, 1.0, 1.2, " one"), words=words[:1], speaker="left"),
        msgspec.structs.replace(segment(1, 0.9, 1.1, " two"), words=words[1:], speaker="right"),
    ]
    assert verbose_words(transcript(*speakers)) == ["two", "one"]


def verbose_words(of: Transcript) -> list[str]:
    body = json.loads(render(of, "verbose_json", RenderOptions(with_words=True)))
    return [word["word"] for word in body["words"]]


def test_diarized_json_has_segments_with_speakers_and_rounded_times() -> None:
    spoken = msgspec.structs.replace(segment(0, 0.50049, 2.00051, " one "), speaker="ann")
    body = json.loads(render(transcript(spoken, text="one", duration_s=12.0004), "diarized_json"))
    assert body == {
        "task": "transcribe",
        "duration": 12.0,
        "text": "one",
        "segments": [
            {
                "type": "transcript.text.segment",
                "id": "seg_001",
                "start": 0.5,
                "end": 2.001,
                "speaker": "ann",
                "text": "one",
            }
        ],
        "usage": {"type": "duration", "seconds": 12},
    }


def test_what_openai_has_not_is_there_only_where_there_is_something_to_tell() -> None:
    more = msgspec.structs.replace(
        ONE,
        is_cut_short=True,
        tracks=(Track(2, "de", None),),
        dropped=(DroppedSegment(1.00049, 2, " hm", "echo"),),
        language_probability=0.5,
        languages=("en", "de"),
    )
    body = json.loads(render(more, "verbose_json"))
    assert (body["truncated"], body["tracks"]) == (True, [{"number": 2, "language": "de"}])
    assert body["dropped"] == [{"start": 1.0, "end": 2.0, "text": " hm", "reason": "echo"}]
    assert (body["language_probability"], body["languages"]) == (0.5, [{"code": "en"}, {"code": "de"}])
    assert json.loads(render(more, "json"))["truncated"] is True
    assert "languages" not in json.loads(render(ONE, "verbose_json")), "one language has a field of its own"


def test_no_cue_is_shown_beyond_the_end_of_the_recording() -> None:
    """A short word at the very end would be shown for a second."""
    last = msgspec.structs.replace(segment(0, 3.6, 3.9, " Yes."), words=(Word(" Yes.", 3.6, 3.9),))
    ended = msgspec.structs.replace(ONE, segments=(last,), duration_s=4.0)
    assert "00:00:03,600 --> 00:00:04,000" in render(ended, "srt")
    assert "00:00:03.600 --> 00:00:04.000" in render(ended, "vtt")
    assert "00:00:03,600 --> 00:00:04,600" in srt([last])
