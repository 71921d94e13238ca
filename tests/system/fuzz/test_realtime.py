"""Events that are nearly those of the realtime API: each is answered, and the session goes on."""

import json
import struct
from typing import Any

import httpx
import psutil
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy, binary, builds, integers, lists, one_of, sampled_from
from websockets.sync.client import connect

from tests.conftest import Server
from tests.system.fuzz.fuzzing import ANSWER_LIMIT_S, answer_to, fuzz, fuzzing

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


HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
CONTENTS = (
    *(b"", b"{}", b'{"type":"input_audio_buffer.commit"}', b"\x03\xe8", b"\x00\x01why", b"\xff\xff\xff"),
    *(b'{"type":"input_audio_buffer.append","audio":"AAAA"}', b'{"type":"session.update","session":{}}'),
)


def frame(first: int, content: bytes, length: int | None, is_masked: bool) -> bytes:
    """A frame; `length` is what it claims to have."""
    claimed = len(content) if length is None else length
    if claimed < 126:
        size = bytes([claimed | 128 * is_masked])
    elif claimed < 1 << 16:
        size = bytes([126 | 128 * is_masked]) + struct.pack(">H", claimed)
    else:
        size = bytes([127 | 128 * is_masked]) + struct.pack(">Q", claimed)
    return bytes([first]) + size + bytes(4 * is_masked) + content  # a mask of zeros changes nothing


@fuzzing
def test_frames_that_are_nearly_right_are_taken_or_end_the_connection(brisk_server: Server) -> None:
    url = httpx.URL(brisk_server.url)
    firsts = sampled_from([0x81, 0x81, 0x01, 0x80, 0x82, 0x88, 0x89, 0x8A]) | integers(0, 255)
    lengths = sampled_from([None, None, None, 0, 125, 126, 65_536, (1 << 63) - 1, (1 << 64) - 1])
    contents = one_of(sampled_from(CONTENTS), binary(max_size=200))
    frames = builds(frame, firsts, contents, lengths, sampled_from([True, True, True, False]))

    def check(parts: list[bytes]) -> None:
        answer = answer_to((url.host, url.port or 0), HANDSHAKE + b"".join(parts))
        assert not answer or answer.startswith(b"HTTP/1.1 101"), answer

    fuzz(lists(frames, max_size=8), check, psutil.Process(brisk_server.process.pid))
