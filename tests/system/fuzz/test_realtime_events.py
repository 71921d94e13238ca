"""Events that are nearly those of the realtime API: each is answered, and the session goes on."""

import json
from typing import Any

import psutil
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from websockets.sync.client import connect

from tests.conftest import Server
from tests.system.fuzz.fuzzing import ANSWER_LIMIT_S, fuzz, fuzzing

NAMES = (
    *("type", "session", "audio", "input", "format", "rate", "transcription", "model", "language", "prompt"),
    *("languages", "keywords", "delay", "turn_detection", "threshold", "silence_duration_ms", "eagerness"),
    *("noise_reduction", "include", "event_id", "modalities", "client_secret", "x"),
)
VALUES = (
    *("session.update", "transcription_session.update", "input_audio_buffer.append", "whisper-1", "en", ""),
    *("input_audio_buffer.commit", "input_audio_buffer.clear", "transcription", "audio/pcm", "audio/pcmu"),
    *("server_vad", "semantic_vad", "low", "item.input_audio_transcription.logprobs"),
    *("AAAA", "\ud800", "\x00", "<"),
    *(0, 1, -1, 0.5, 24_000, 1 << 70, 1e308, True, None),
)
LAST = {"type": "session.update", "event_id": "the last", "session": {"x": 1}}


def fields() -> SearchStrategy[Any]:
    values = st.sampled_from(VALUES) | st.text(max_size=20)
    return st.recursive(
        values,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
        ),
        max_leaves=12,
    )


def events() -> SearchStrategy[Any]:
    kinds = st.sampled_from([value for value in VALUES if isinstance(value, str) and "." in value])
    audio_input = st.dictionaries(st.sampled_from(NAMES), fields(), max_size=4)
    session = st.builds(lambda given: {"type": "transcription", "audio": {"input": given}}, audio_input)
    whole = st.fixed_dictionaries(
        {"type": kinds}, optional={"session": session | fields(), "audio": fields(), "event_id": fields()}
    )
    return whole | fields()


@fuzzing
def test_events_that_are_nearly_right_are_answered_and_the_session_goes_on(brisk_server: Server) -> None:
    url = brisk_server.url.replace("http", "ws") + "/v1/realtime"

    def check(given: list[Any]) -> None:
        with connect(url, max_size=None) as socket:
            for event in [*given, LAST]:
                socket.send(json.dumps(event))
            answer: dict[str, Any] = {}
            while answer.get("error", {}).get("event_id") != "the last":
                answer = json.loads(socket.recv(timeout=ANSWER_LIMIT_S))

    fuzz(st.lists(events(), max_size=6), check, psutil.Process(brisk_server.process.pid))
