"""Frames that are nearly those of a WebSocket, after a handshake that is right."""

import struct

import httpx
import psutil
from hypothesis.strategies import binary, builds, integers, lists, one_of, sampled_from

from tests.conftest import Server
from tests.system.fuzz.fuzzing import answer_to, fuzz, fuzzing

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
