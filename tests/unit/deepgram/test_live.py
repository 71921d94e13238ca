"""The order in which Deepgram's clients are told what was read: that of speech, whatever ends first."""

import json
from types import SimpleNamespace
from typing import Any, cast

from asr_server.annexes.deepgram.live import ListenDialect
from asr_server.annexes.deepgram.shapes import LiveQuery
from asr_server.annexes.realtime import server_events as out
from asr_server.api.models import ServedModel

MODEL = cast(ServedModel, SimpleNamespace(name="whisper-base"))


def told(events: list[out.ServerEvent], **query: Any) -> list[dict[str, Any]]:
    dialect = ListenDialect(LiveQuery.model_validate(query), MODEL, "req_1")
    return [json.loads(message) for event in events for message in dialect.write(event)]


def reading(item_id: str, text: str, start_s: float, is_final: bool = True) -> out.Interim:
    word = out.LiveWord(text, start_s, start_s + 0.5, 0.9)
    return out.Interim(item_id=item_id, text=text, tail="", words=(word,), audio_end_ms=0, is_final=is_final)


def completed(item_id: str) -> out.Completed:
    return out.Completed(item_id=item_id, transcript="", usage=out.DurationUsage(1.0))


def transcripts(messages: list[dict[str, Any]]) -> list[str]:
    return [
        each["channel"]["alternatives"][0]["transcript"] for each in messages if each["type"] == "Results"
    ]


def committed(*item_ids: str) -> list[out.ServerEvent]:
    return [out.Committed(item_id=item_id, previous_item_id=None) for item_id in item_ids]


def test_a_turn_that_is_read_first_waits_for_the_one_before() -> None:
    events = [*committed("a", "b"), reading("b", "second", 5.0), completed("b")]
    assert told(events) == []
    messages = told([*events, reading("a", "first", 1.0), completed("a")])
    assert transcripts(messages) == ["first", "second"]
    assert [each["speech_final"] for each in messages] == [True, True]


def test_the_speakers_of_a_turn_are_those_of_its_own_words() -> None:
    events = [
        *committed("a", "b"),
        reading("a", "first", 1.0),
        reading("b", "second", 5.0),
        out.SpokenSegment(item_id="a", id="seg_1", text="", speaker="B", start=0.0, end=2.0),
        completed("a"),
        out.SpokenSegment(item_id="b", id="seg_2", text="", speaker="A", start=4.0, end=6.0),
        completed("b"),
    ]
    messages = told(events, diarize=True)
    words = [word for each in messages for word in each["channel"]["alternatives"][0]["words"]]
    assert [(word["word"], word["speaker"]) for word in words] == [("first", 0), ("second", 1)]


def test_a_finalize_right_behind_a_turn_that_is_read_is_answered_by_that_turn() -> None:
    dialect = ListenDialect(LiveQuery.model_validate({}), MODEL, "req_1")
    dialect.write(committed("a")[0])
    dialect.read({"text": '{"type": "Finalize"}'})
    error = out.EventError("invalid_request_error", None, "too short", None, event_id=None)
    assert dialect.write(out.Error(error=error)) == []
    messages = [json.loads(each) for each in dialect.write(reading("a", "first", 1.0))]
    messages += [json.loads(each) for each in dialect.write(completed("a"))]
    assert [(each["from_finalize"], *transcripts([each])) for each in messages] == [(True, "first")]


def test_speech_that_goes_on_ends_no_utterance() -> None:
    dialect = ListenDialect(LiveQuery.model_validate({"utterance_end_ms": 1000}), MODEL, "req_1")
    for event in (*committed("a"), reading("a", "first", 1.0), completed("a")):
        dialect.write(event)
    assert not dialect.hear(2.0)
    dialect.write(out.SpeechStarted(item_id="b", audio_start_ms=2000))
    dialect.write(out.SpeechStopped(item_id="b", audio_end_ms=4000))
    assert not dialect.hear(4.1)
    for event in (*committed("b"), reading("b", "second", 3.0), completed("b")):
        dialect.write(event)
    assert json.loads(dialect.hear(4.6)[0])["last_word_end"] == 3.5


def test_text_that_comes_behind_all_audio_ends_its_utterances_too() -> None:
    dialect = ListenDialect(LiveQuery.model_validate({"utterance_end_ms": 1000}), MODEL, "req_1")
    for id, start_ms in (("a", 900), ("b", 2900)):
        dialect.write(out.SpeechStarted(item_id=id, audio_start_ms=start_ms))
    assert not dialect.hear(5.0)
    texts = (reading("a", "first", 1.0), completed("a"), reading("b", "second", 3.0), completed("b"))
    messages = [json.loads(each) for event in texts for each in dialect.write(event)]
    assert [each["last_word_end"] for each in messages if each["type"] == "UtteranceEnd"] == [1.5, 3.5]


def test_what_was_read_of_a_turn_that_fails_is_told_before_its_error() -> None:
    error = out.ItemError("server_error", None, "broken", None)
    messages = told([*committed("a"), reading("a", "first", 1.0), out.Failed(item_id="a", error=error)])
    assert transcripts(messages) == ["first"]
    assert messages[-1] == {
        "type": "Error",
        "variant": "TranscriptionError",
        "description": "broken",
        "message": "broken",
    }
