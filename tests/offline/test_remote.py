"""What a server may answer, one scripted answer after another, from a real socket."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from asr_server.core import Track, Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue, UploadTooLarge
from asr_server.offline import remote
from asr_server.offline.local import TranscribeJob
from asr_server.offline.remote import RemoteServer, RemoteTranscriber, Turns
from tests.api.running_app import QuickServer

DONE = {
    "type": "transcript.text.done",
    "text": "one",
    "language": "english",
    "duration": 1.5,
    "segments": [],
    "usage": {"type": "tokens", "input_tokens": 75, "output_tokens": 2, "total_tokens": 77},
}
DELTA = {"type": "transcript.text.delta", "delta": "one", "usage": DONE["usage"]}


def error(status: int, param: str | None = None, **headers: str) -> Response:
    body = {"error": {"message": f"said {status}", "type": "x", "param": param, "code": None}}
    return JSONResponse(body, status, headers)


def stream(*events: dict[str, Any]) -> Response:
    lines = (f"data: {json.dumps(event)}\n\n" for event in events)
    return StreamingResponse(lines, media_type="text/event-stream")


def broken_error(kind: str) -> dict[str, Any]:
    return {"error": {"message": "broken", "type": kind, "param": "file", "code": None}}


class Scripted:
    def __init__(self, answers: Sequence[Response]) -> None:
        self.answers = list(answers)
        self.uploads: list[tuple[int, float]] = []  # bytes, and when they were in
        self.keys: set[str | None] = set()
        self.limits: dict[str, int] = {}

    async def answer(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        num_bytes = 0
        async for data in request.stream():
            num_bytes += len(data)
        self.uploads.append((num_bytes, time.monotonic()))
        return self.answers.pop(0)

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "digits"} | self.limits]})


@asynccontextmanager
async def serving(*answers: Response) -> AsyncIterator[tuple[str, Scripted]]:
    scripted = Scripted(answers)
    routes = [
        Route("/v1/models", scripted.models),
        Route("/v1/audio/transcriptions", scripted.answer, methods=["POST"]),
    ]
    config = uvicorn.Config(Starlette(routes=routes), port=0, log_config=None, lifespan="off", ws="none")
    server = QuickServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", scripted
    finally:
        server.should_exit = True
        await task


async def transcribe(url: str, path: Path) -> tuple[Transcript, list[float]]:
    progress: list[float] = []
    transcriber = RemoteTranscriber(RemoteServer(url, "secret"), TranscribeJob((str(path),)))
    async with transcriber.running():
        transcript = await transcriber.transcribe(path, lambda done_s, total_s: progress.append(done_s))
    return transcript, progress


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF" * 1000)
    return path


async def test_an_answer_is_the_last_event_and_the_others_tell_how_far_it_is(recording: Path) -> None:
    tracks = [{"number": 2, "language": "ger"}]
    async with serving(stream(DELTA, DONE | {"truncated": True, "tracks": tracks})) as (url, scripted):
        transcript, progress = await transcribe(url, recording)
    assert (transcript.text, transcript.duration_s, transcript.is_cut_short) == ("one", 1.5, True)
    assert transcript.tracks == (Track(2, "ger"),)
    assert progress == [1.5]
    assert scripted.keys == {"Bearer secret"}


async def test_a_server_on_this_machine_is_asked_without_a_proxy(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    async with serving(stream(DELTA, DONE)) as (url, _):
        transcript, _ = await transcribe(url, recording)
    assert transcript.text == "one"


@pytest.mark.slow
@pytest.mark.parametrize(("status", "header"), [(429, "retry-after"), (503, "retry-after-ms")])
async def test_a_server_that_is_busy_is_asked_again_when_it_said(
    recording: Path, status: int, header: str
) -> None:
    wait = "1" if header == "retry-after" else "600"
    async with serving(error(status, **{header: wait}), stream(DONE)) as (url, scripted):
        assert (await transcribe(url, recording))[0].text == "one"
    (first_bytes, first_at), (second_bytes, second_at) = scripted.uploads
    assert first_bytes == second_bytes  # the recording is sent whole each time
    assert second_at - first_at >= (1.0 if header == "retry-after" else 0.6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [error(500), error(502), error(408), stream(broken_error("service_unavailable_error")), stream(DELTA)],
)
async def test_what_may_pass_is_tried_again_without_being_told_when(recording: Path, first: Response) -> None:
    async with serving(first, stream(DONE)) as (url, scripted):
        assert (await transcribe(url, recording))[0].text == "one"
    assert len(scripted.uploads) == 2


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error(400, "file"), InvalidAudio),  # this recording alone
        (error(413, "file"), InvalidAudio),
        (HTMLResponse("<html>too large", 413), InvalidAudio),  # a proxy's, which knows no fields
        (error(415), InvalidAudio),
        (error(422), InvalidAudio),
        (HTMLResponse("<html>forbidden", 403), InvalidAudio),
        (stream(broken_error("invalid_request_error")), InvalidAudio),
        (error(400, "language"), InvalidValue),  # every recording
        (error(401), InvalidValue),
        (error(403), InvalidValue),
        (error(404, "model"), InvalidValue),
        (error(500, **{"x-should-retry": "false"}), ChunkFailed),
        (stream(broken_error("server_error")), ChunkFailed),
        (Response("<html>hello", media_type="text/html"), ChunkFailed),
        (stream({"type": "transcript.text.done", "text": "of another server"}), ChunkFailed),
    ],
)
async def test_a_refusal_is_not_tried_again(recording: Path, answer: Response, kind: type[Exception]) -> None:
    async with serving(answer) as (url, scripted):
        with pytest.raises(kind):
            await transcribe(url, recording)
    assert len(scripted.uploads) == 1


@pytest.mark.slow
async def test_patience_has_an_end_with_a_server_that_is_always_busy(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.5)
    busy = [error(429, **{"retry-after-ms": "100"}) for _ in range(100)]
    async with serving(*busy) as (url, scripted):
        with pytest.raises(EngineUnavailable, match="said 429"):
            await transcribe(url, recording)
    assert len(scripted.uploads) > 1
    assert scripted.uploads[-1][1] - scripted.uploads[0][1] >= 0.4


@pytest.mark.slow
async def test_what_fails_again_and_again_without_a_word_is_given_up(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_UNASKED", 2)
    answers = [error(500), error(503, **{"retry-after-ms": "1"}), error(500), error(500)]
    async with serving(*answers) as (url, scripted):
        with pytest.raises(ChunkFailed, match="said 500"):
            await transcribe(url, recording)
    assert len(scripted.uploads) == 4


async def test_a_large_recording_is_sent_as_it_is_read(tmp_path: Path) -> None:
    recording = tmp_path / "large.wav"
    with recording.open("wb") as file:
        file.truncate(32 << 20)
    async with serving(stream(DONE)) as (url, scripted):
        tracemalloc.start()
        try:
            await transcribe(url, recording)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert scripted.uploads[0][0] > 32 << 20
    assert peak_bytes < 8 << 20


async def test_a_server_labels_speakers_whose_words_overlap(recording: Path) -> None:
    def segment(id: int, start_s: float, end_s: float, text: str, speaker: str) -> dict[str, Any]:
        figures = dict.fromkeys(("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"), 0.0)
        times = {"seek": 0, "start": start_s, "end": end_s, "tokens": []}
        return {"id": id, "text": text, "speaker": speaker, **times, **figures}

    spoken = [("one", 0.0, "ann"), ("yes", 0.5, "bob"), ("two", 1.0, "ann")]
    words = [{"word": word, "start": at, "end": at + 0.4, "speaker": who} for word, at, who in spoken]
    segments = [segment(0, 0.0, 1.4, " one two", "ann"), segment(1, 0.5, 0.9, " yes", "bob")]
    async with serving(stream(DONE | {"segments": segments, "words": words})) as (url, _):
        transcript, _ = await transcribe(url, recording)
    assert [(each.speaker, [word.text for word in each.words]) for each in transcript.segments] == [
        ("ann", [" one", " two"]),
        ("bob", [" yes"]),
    ]


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(1 << 30, 2), (4 << 20, 4), ((17 << 20) // 5, 4), (1000, 16)]
)
async def test_recordings_are_sent_in_order_few_at_once_where_they_are_large(
    num_bytes: int, most: int
) -> None:
    """All at once they would share the server, and none would be done before nearly all are."""
    turns, under_way, begun, most_under_way = Turns(), set[int](), list[int](), 0

    async def send(number: int) -> None:
        nonlocal most_under_way
        async with turns.turn(num_bytes):
            begun.append(number)
            under_way.add(number)
            most_under_way = max(most_under_way, len(under_way))
            for _ in range(100):
                await asyncio.sleep(0)
            under_way.remove(number)

    await asyncio.gather(*map(send, range(16)))
    assert begun == list(range(16))
    assert most_under_way == most


async def test_a_recording_larger_than_the_server_takes_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "hour.wav"
    with path.open("wb") as file:
        file.truncate(3 << 20)
    async with serving() as (url, scripted):
        scripted.limits = {"max_upload_bytes": 2 << 20}
        with pytest.raises(UploadTooLarge, match=r"has 3 MiB, and the server takes 2 MiB at most .* mp3"):
            await transcribe(url, path)
    assert scripted.uploads == []
