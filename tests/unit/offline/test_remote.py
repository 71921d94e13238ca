"""What a server may answer, one scripted answer after another, from a real socket."""

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

from asr_server.annexes.offline import refusals, remote
from asr_server.annexes.offline.local import TranscribeJob
from asr_server.annexes.offline.refusals import TryAgain, with_retries
from asr_server.annexes.offline.remote import RemoteServer, RemoteTranscriber, Turns
from asr_server.api.events import EventWriter
from asr_server.api.schemas import TranscriptionFields
from asr_server.core import DroppedSegment, Segment, Track, Transcript, Word
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue, UploadTooLarge
from asr_server.formats.render import RenderOptions, TextDone, VerboseJson
from tests.unit.api.running_app import QuickServer

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
        self.first: list[Response] = []  # answers to the question for the models, before the right one

    async def answer(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        num_bytes = 0
        async for data in request.stream():
            num_bytes += len(data)
        self.uploads.append((num_bytes, time.monotonic()))
        return self.answers.pop(0)

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization"))
        if self.first:
            return self.first.pop(0)
        return JSONResponse({"data": [{"id": "digits"} | self.limits]})


@asynccontextmanager
async def serving(*answers: Response) -> AsyncIterator[tuple[str, Scripted]]:
    scripted = Scripted(answers)
    routes = [
        Route("/v1/models", scripted.models),
        Route("/behind/v1/models", scripted.models),
        Route("/behind/v1/audio/transcriptions", scripted.answer, methods=["POST"]),
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
    async with serving(stream(DELTA, DONE)) as (url, scripted):
        transcript, progress = await transcribe(url, recording)
    assert (transcript.text, transcript.duration_s) == ("one", 1.5)
    assert progress == [1.5]
    assert scripted.keys == {"Bearer secret"}


FIGURES = {"temperature": 0.2, "avg_logprob": -0.1, "compression_ratio": 1.5, "no_speech_prob": 0.3}
EVERY_FIELD = Transcript(
    text="One two. Yes.",
    segments=(
        Segment(0, 10, 0.0, 1.4, " One two.", (5, 6), **FIGURES, speaker="ann",
                words=(Word(" One", 0.0, 0.4), Word(" two.", 1.0, 1.4))),
        Segment(1, 10, 0.5, 0.9, " Yes.", (7,), **FIGURES, speaker="bob", words=(Word(" Yes.", 0.5, 0.9),)),
    ),
    logprobs=(),
    language="english",
    duration_s=1.5,
    num_audio_tokens=0,
    num_text_tokens=0,
    task="translate",
    language_probability=0.75,
    languages=("en", "de"),
    is_cut_short=True,
    tracks=(Track(2, "ger", "Commentary"),),
    dropped=(DroppedSegment(1.0, 1.5, "Thanks.", "no_voice"),),
)  # fmt: skip


def test_a_transcript_passes_through_a_stream_with_every_field() -> None:
    fields = TranscriptionFields.model_validate({"stream": True, "stream_include_segments": True})
    done = EventWriter(fields, RenderOptions(with_words=True)).done(EVERY_FIELD)
    body = TextDone.model_validate_json(done.removeprefix(b"data: "))
    assert all(getattr(body, name) is not None for name in TextDone.model_fields if name != "logprobs")
    assert VerboseJson.model_fields.keys() - {"task"} <= TextDone.model_fields.keys()
    assert remote.transcript_from(body, "translate") == EVERY_FIELD


async def test_no_proxy_is_used_on_this_machine(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    async with serving(stream(DELTA, DONE)) as (url, _):
        transcript, _ = await transcribe(url, recording)
    assert transcript.text == "one"


@pytest.mark.slow
@pytest.mark.parametrize(("status", "header"), [(429, "retry-after"), (503, "retry-after-ms")])
async def test_a_busy_server_is_asked_again_when_it_said(recording: Path, status: int, header: str) -> None:
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
async def test_what_may_pass_is_tried_again_and_a_line_says_so(
    recording: Path, first: Response, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(first, stream(DONE)) as (url, scripted):
        assert (await transcribe(url, recording))[0].text == "one"
    assert len(scripted.uploads) == 2
    assert capsys.readouterr().err.startswith("waiting for 127.0.0.1: ")


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (403, "answered 403 Forbidden, without a reason"),
        (404, "answered 404 Not Found, without a reason"),
        (502, "answered 502 Bad Gateway, without a reason"),
    ],
)
async def test_a_proxy_that_refuses_is_named_with_its_address(
    recording: Path, status: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "MAX_UNASKED", 1)
    async with serving() as (url, scripted):
        scripted.first = [HTMLResponse("<html>", status)]
        with pytest.raises((EngineUnavailable, InvalidValue)) as caught:
            await transcribe(url, recording)
    assert str(caught.value) == f"{url}/v1/models {line}"


async def test_a_redirect_on_the_same_host_is_followed_and_the_key_goes_to_no_other(recording: Path) -> None:
    async with serving(stream(DONE)) as (url, scripted):
        scripted.first = [Response(status_code=308, headers={"location": f"{url}/behind/v1/models"})]
        assert (await transcribe(url, recording))[0].text == "one"
        scripted.first = [Response(status_code=302, headers={"location": "http://example.com/v1/models"})]
        with pytest.raises(InvalidValue, match=r"redirects to http://example.com/v1/models: give --url"):
            await transcribe(url, recording)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"data": []}', '{"data": [1]}', '{"data": [{}]}'])
async def test_what_is_no_list_of_models_is_no_server_of_ours(recording: Path, content: str) -> None:
    async with serving() as (url, scripted):
        scripted.first = [Response(content)]
        with pytest.raises(EngineUnavailable, match="/v1/models is not answered as an asr-server does"):
            await transcribe(url, recording)


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


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.sleeps = 1000.0, list[float]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.now_s += duration_s


@pytest.mark.parametrize(
    ("waits_s", "is_done"),
    [
        ([None] * 7, True),
        ([None] * 8, False),  # eight in a row, without a word
        ([*[None] * 7, 3.0, *[None] * 7], True),
        ([100.0] * 10, True),
        ([100.0] * 11, False),  # a quarter of an hour is over
    ],
)
async def test_a_server_is_asked_eight_times_or_for_a_quarter_of_an_hour(
    waits_s: list[float | None], is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, remaining = Clock(monkeypatch), list(waits_s)

    async def attempt() -> str:
        if remaining:
            raise TryAgain(ChunkFailed("no"), remaining.pop(0))
        return "done"

    if is_done:
        assert await with_retries(attempt, lambda error: None) == "done"
    else:
        with pytest.raises(ChunkFailed, match="no"):
            await with_retries(attempt, lambda error: None)
    for wait_s, slept_s in zip(waits_s, clock.sleeps, strict=False):
        assert slept_s == wait_s if wait_s is not None else 0.5 <= slept_s <= 1.25 * 30


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


@pytest.mark.parametrize(
    ("num_bytes", "most"), [(1 << 30, 2), (4 << 20, 4), ((17 << 20) // 5, 4), (1000, 16)]
)
async def test_recordings_are_sent_in_order_few_at_once_if_large(num_bytes: int, most: int) -> None:
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
