"""Bytes that are nearly events of the Wyoming protocol: each is answered or refused."""

import json

import psutil
from hypothesis.strategies import one_of

from tests.conftest import Server
from tests.system.fuzz.fuzzing import answer_to, damaged, fuzz, fuzzing, pieces_of

FORMAT = {"rate": 16_000, "width": 2, "channels": 1}


def event(type: object, data: object = None, payload: bytes = b"", **more: object) -> bytes:
    header = {"type": type, "data": data, "payload_length": len(payload) or None} | more
    return json.dumps(header).encode() + b"\n" + payload


WHOLE = (
    event("transcribe", {"language": "en"})
    + event("audio-start", FORMAT)
    + event("audio-chunk", FORMAT, bytes(3200))
    + event("audio-stop")
)
PIECES = (
    *(
        WHOLE,
        event("describe"),
        event("ping", {"text": "x"}),
        event("ping", {"text": 1}),
        event("audio-stop"),
    ),
    *(event("audio-start", FORMAT), event("audio-chunk", FORMAT, bytes(320)), event("audio-chunk", {})),
    *(event("audio-start", FORMAT | {name: value}) for name in FORMAT for value in (0, -1, 1 << 40, "x", 3)),
    *(event("transcribe", {"name": "x"}), event("transcribe", {"language": "\x1b"}), event("transcribe", [])),
    *(event("transcribe", {"transcript_terms": ["x"] * 50}), event("transcribe", {"language": 1})),
    *(
        event("x", None, data_length=2) + b"{}",
        event("x", data_length=-1),
        event("x", payload_length=1 << 40),
    ),
    *(event("x" * 70_000), b"\n", b"{}\n", b"[" * 5000 + b"\n", b'{"type":null}\n', b'{"type":"\\ud800"}\n'),
)


@fuzzing
def test_bytes_that_are_nearly_events_are_answered_or_refused(brisk_server: Server) -> None:
    assert brisk_server.process.stdout is not None
    host, _, port = brisk_server.process.stdout.readline().rpartition("//")[2].strip().rpartition(":")

    def check(data: bytes) -> None:
        for line in answer_to((host, int(port)), data).splitlines():
            assert b"server_error" not in line

    fuzz(one_of(damaged(WHOLE), pieces_of(*PIECES)), check, psutil.Process(brisk_server.process.pid))
