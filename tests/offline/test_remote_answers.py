"""What each answer of a server means, and how long and how often it is asked again."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from asr_server.core import Segment, Word
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue
from asr_server.offline import remote
from asr_server.offline.local import TranscribeJob
from asr_server.offline.remote import (
    Done,
    RemoteServer,
    RemoteTranscriber,
    TryAgain,
    refusal,
    refusal_in_stream,
    transcript_of,
    with_retries,
)
from asr_server.speakers.clustering import SpeakerCount

ERROR = {"message": "said so", "type": "x", "param": None}


def body(**fields: Any) -> bytes:
    return json.dumps({"error": ERROR | fields}).encode()


# -- One answer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (499, body(), InvalidValue),
        (400, body(), InvalidValue),
        (400, body(param="file"), InvalidAudio),
        (400, body(param="channels"), InvalidAudio),
        (400, body(param="track"), InvalidAudio),
        (400, b"no JSON", InvalidValue),
        (403, b"no JSON", InvalidAudio),
        (403, b'{"error": "a text"}', InvalidAudio),
        (403, body(), InvalidValue),
        (413, body(), InvalidAudio),
        (415, b"", InvalidAudio),
        (422, body(), InvalidAudio),
    ],
)
def test_a_refusal_is_of_this_recording_or_of_all(status: int, content: bytes, kind: type[Exception]) -> None:
    assert type(refusal(status, {}, content)) is kind


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (408, ChunkFailed),
        (409, ChunkFailed),
        (429, EngineUnavailable),
        (500, ChunkFailed),
        (503, EngineUnavailable),
    ],
)
def test_what_may_pass_is_tried_again_unless_the_server_knows_better(
    status: int, kind: type[Exception]
) -> None:
    again = refusal(status, {}, body())
    assert isinstance(again, TryAgain)
    assert (type(again.error), str(again.error), again.wait_s) == (kind, "said so", None)
    never = refusal(status, {"x-should-retry": "false"}, body())
    assert type(never) is (ChunkFailed if status >= 500 else InvalidValue)
    assert isinstance(refusal(status, {"x-should-retry": "true"}, body()), TryAgain)


def test_a_server_that_says_nothing_is_quoted_with_its_status() -> None:
    assert "answered 400 without saying why" in str(refusal(400, {}, b""))


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "-1"}, 0.0),
        ({"retry-after": "121"}, 120.0),
        ({"retry-after": "Sat, 1 Jan 2028"}, None),
        ({"retry-after": "7", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "7", "retry-after-ms": "soon"}, 7.0),
    ],
)
def test_a_server_says_in_seconds_or_milliseconds_when_to_come_back(
    headers: Mapping[str, str], wait_s: float | None
) -> None:
    again = refusal(503, headers, body())
    assert isinstance(again, TryAgain)
    assert again.wait_s == wait_s


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"type": "server_error"}, ChunkFailed),
        ({"type": "invalid_request_error"}, InvalidValue),
        ({"type": "invalid_request_error", "param": "file"}, InvalidAudio),
    ],
)
def test_an_error_in_the_stream_is_final(fields: dict[str, str], kind: type[Exception]) -> None:
    error = refusal_in_stream(ERROR | fields)
    assert (type(error), str(error)) == (kind, "said so")


# -- One after another ---------------------------------------------------------------------------------------


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.sleeps: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)
        monkeypatch.setattr(random, "uniform", lambda least, most: most)

    async def _sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def failing(*waits_s: float | None, then: str = "done") -> str:
    remaining = list(waits_s)

    async def attempt() -> str:
        if remaining:
            raise TryAgain(ChunkFailed(f"{len(remaining)} left"), remaining.pop(0))
        return then

    return await with_retries(attempt)


async def test_tries_are_further_and_further_apart_up_to_half_a_minute(clock: Clock) -> None:
    assert await failing(*[None] * 7) == "done"
    assert clock.sleeps == [1.25 * wait_s for wait_s in (0.5, 1, 2, 4, 8, 16, 30)]


async def test_no_try_comes_sooner_than_told(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: least)
    assert await failing(*[None] * 3) == "done"
    assert clock.sleeps == [0.5, 1.0, 2.0]


async def test_eight_tries_without_a_word_are_all(clock: Clock) -> None:
    with pytest.raises(ChunkFailed, match="1 left"):
        await failing(*[None] * 8)
    assert len(clock.sleeps) == 7


async def test_a_server_that_says_when_to_come_back_begins_a_new_row(clock: Clock) -> None:
    assert await failing(*[None] * 7, 3.0, *[None] * 7) == "done"
    assert clock.sleeps[7:9] == [3.0, 1.25 * 0.5]


async def test_after_a_quarter_of_an_hour_nobody_is_asked_again(clock: Clock) -> None:
    assert await failing(*[100.0] * 9, 1.0) == "done"
    with pytest.raises(ChunkFailed, match="1 left"):
        await failing(*[100.0] * 9, 1.0, 1.0)


# -- What is asked for ---------------------------------------------------------------------------------------


def fields_of(**changes: Any) -> dict[str, Any]:
    """The form's fields, without those of every request."""
    transcriber = RemoteTranscriber(RemoteServer("http://x"), TranscribeJob(("a.wav",), **changes))
    always = ("stream", "stream_include_segments", "stream_continuous_usage_stats")
    fields = transcriber._fields
    assert [fields[name] for name in always] == ["true"] * 3
    return {name: value for name, value in fields.items() if name not in always}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {}),
        ({"language": "de", "prompt": "a", "track": "2"}, {"language": "de", "prompt": "a", "track": "2"}),
        ({"hotwords": ("a", "b"), "temperature": 0.5}, {"hotwords": "a,b", "temperature": 0.5}),
        ({"condition_on_previous_text": True}, {"condition_on_previous_text": "true"}),
        ({"multilingual": True}, {"multilingual": "true"}),
        ({"word_timestamps": True}, {"timestamp_granularities[]": ["segment", "word"]}),
        ({"speakers": ("A", "B")}, {"channels": "split", "known_speaker_names[]": ["A", "B"]}),
        ({"voices": SpeakerCount()}, {"diarize": "true"}),
        ({"voices": SpeakerCount(1, 1)}, {"diarize": "true", "max_speakers": "1"}),
        ({"voices": SpeakerCount(2, 4)}, {"diarize": "true", "min_speakers": "2", "max_speakers": "4"}),
    ],
)
def test_a_job_becomes_the_fields_of_a_form(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    found = fields_of(**changes)
    if "voices" in changes:
        found.pop("timestamp_granularities[]")  # word times tell where a voice ends
    assert found == fields


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://x", "http://x/v1/"),
        ("https://x:9/v1/", "https://x:9/v1/"),
        ("http://x/asr/v1", "http://x/asr/v1/"),
    ],
)
def test_an_address_has_v1_once(url: str, base: str) -> None:
    assert RemoteServer(url).base_url == base


@pytest.mark.parametrize("url", ["nowhere", "ftp://x", "http://", "http://x:port", "http:///v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match="is no address of a server"):
        RemoteTranscriber(RemoteServer(url), TranscribeJob(("a.wav",)))


@pytest.mark.parametrize(("url", "takes_proxies"), [("http://gpu-host", True), ("http://localhost", False)])
def test_a_proxy_is_for_other_hosts_and_a_key_is_sent_where_there_is_one(
    url: str, takes_proxies: bool
) -> None:
    keyed, plain = (RemoteTranscriber(RemoteServer(url, key), TranscribeJob(("a",))) for key in ("k", ""))
    assert keyed._client.headers["authorization"] == "Bearer k"
    assert "authorization" not in plain._client.headers
    assert plain._client.trust_env is takes_proxies
    assert plain._client.timeout == httpx2.Timeout(600.0, connect=20.0)
    assert remote.MAX_EVENT_BYTES == 256 << 20


# -- What is answered ----------------------------------------------------------------------------------------


def segment(id: int, text: str, speaker: str | None = None) -> dict[str, Any]:
    figures = {"temperature": 0.2, "avg_logprob": -0.1, "compression_ratio": 1.5, "no_speech_prob": 0.3}
    times = {"seek": 100, "start": 1.0, "end": 2.0, "tokens": [5, 6]}
    return {"id": id, "text": text, "speaker": speaker, **times, **figures}


def done(**changes: Any) -> Done:
    usage = {"type": "tokens", "input_tokens": 75, "output_tokens": 2, "total_tokens": 77}
    plain = {"text": "x", "language": "english", "duration": 1.5, "segments": [], "usage": usage}
    return Done.model_validate(plain | changes)


def test_a_transcript_is_as_the_server_has_it() -> None:
    found = transcript_of(done(segments=[segment(3, " one", "ann")], languages=[{"code": "en"}]), "translate")
    assert (found.text, found.language, found.duration_s, found.task) == ("x", "english", 1.5, "translate")
    assert (found.num_audio_tokens, found.num_text_tokens, found.languages) == (75, 2, ("en",))
    assert not found.is_cut_short
    figures: dict[str, Any] = {"temperature": 0.2, "avg_logprob": -0.1}
    figures |= {"compression_ratio": 1.5, "no_speech_prob": 0.3}
    assert found.segments == (Segment(3, 100, 1.0, 2.0, " one", (5, 6), **figures, speaker="ann"),)
    assert transcript_of(done(truncated=True), "transcribe").is_cut_short


def test_words_get_the_spaces_of_their_segments() -> None:
    words = [
        {"word": word, "start": at, "end": at + 0.5} for at, word in enumerate(["one", "two", "two", "3"])
    ]
    segments = [segment(0, " one, two"), segment(1, "  "), segment(2, " two 3 and what has no word")]
    found = transcript_of(done(segments=segments, words=words), "transcribe").segments
    assert [each.words for each in found] == [
        (Word(" one", 0.0, 0.5), Word(", two", 1.0, 1.5)),
        (),
        (Word(" two", 2.0, 2.5), Word(" 3", 3.0, 3.5)),
    ]
