"""A server elsewhere, answer by answer: who it is, what it streams, and how its connection is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from asr_server.core import Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue, UploadTooLarge
from asr_server.offline.local import TranscribeJob
from asr_server.offline.remote import RemoteServer, RemoteTranscriber

USAGE = {"type": "tokens", "input_tokens": 75, "output_tokens": 2, "total_tokens": 77}
DELTA = {"type": "transcript.text.delta", "delta": "x", "usage": USAGE}
DONE = {
    "type": "transcript.text.done",
    "text": "x",
    "language": "english",
    "duration": 1.5,
    "segments": [],
    "usage": USAGE,
}
MODELS = {"data": [{"id": "base", "max_upload_bytes": 100}, {"id": "other"}]}
Answer = httpx2.Response | Exception


def stream(*events: object) -> httpx2.Response:
    content = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content.encode())


def failed(**detail: Any) -> dict[str, Any]:
    return {"error": {"message": "said so", "param": None} | detail}


class Server:
    """Gives each request the next of its answers."""

    def __init__(self, answers: list[Answer]) -> None:
        self.requests: list[httpx2.Request] = []
        self._answers: Iterator[Answer] = iter(answers)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = next(self._answers)
        if isinstance(answer, httpx2.TransportError):
            answer.request = request
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before another try, which take no time."""
    waits: list[float] = []

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waits


async def transcribed(
    folder: Path,
    *answers: Answer,
    on_progress: Callable[..., None] = lambda *_: None,
    num_bytes: int = 100,
    model: str = "",
) -> tuple[Transcript, RemoteTranscriber, Server]:
    recording = folder / "a.wav"
    recording.write_bytes(bytes(num_bytes))
    server = Server([httpx2.Response(200, json=MODELS), *answers])
    transcriber = RemoteTranscriber(RemoteServer("http://x", model=model), TranscribeJob(("a.wav",)))
    transcriber._client._transport = httpx2.MockTransport(server)
    async with transcriber.running() as running:
        return await running.transcribe(recording, on_progress), running, server


async def refused(*answers: Answer) -> Exception:
    transcriber = RemoteTranscriber(RemoteServer("http://x"), TranscribeJob(("a.wav",)))
    transcriber._client._transport = httpx2.MockTransport(Server(list(answers)))
    with pytest.raises((EngineUnavailable, InvalidValue)) as caught:
        async with transcriber.running():
            pass
    return caught.value


# -- Who is there --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "used"), [("", "base"), ("turbo", "turbo")])
async def test_the_first_model_serves_unless_one_is_named(tmp_path: Path, given: str, used: str) -> None:
    transcript, transcriber, server = await transcribed(tmp_path, stream(DONE), model=given)
    assert (transcript.text, transcriber.model) == ("x", used)
    assert [request.url.path for request in server.requests] == ["/v1/models", "/v1/audio/transcriptions"]
    assert f'name="model"\r\n\r\n{used}\r\n'.encode() in server.requests[1].content


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"data": []}', b'{"data": [1]}', b'{"data": [{}]}'])
async def test_what_is_no_list_of_models_is_no_server_of_ours(content: bytes) -> None:
    error = await refused(httpx2.Response(200, content=content))
    assert isinstance(error, EngineUnavailable)
    assert str(error) == "http://x/v1/models is not answered as an asr-server does"


async def test_a_key_that_is_refused_ends_the_run_and_a_server_that_starts_is_waited_for(
    waits: list[float],
) -> None:
    key = httpx2.Response(401, json=failed(code="invalid_api_key"))
    loading = httpx2.Response(503, json=failed(), headers={"retry-after": "7"})
    assert isinstance(await refused(loading, loading, key), InvalidValue)
    assert waits == [7, 7]


@pytest.mark.parametrize(
    ("error", "told"),
    [(httpx2.ConnectError("no route"), "no route"), (httpx2.ConnectTimeout(""), "ConnectTimeout")],
)
async def test_a_server_that_cannot_be_reached_is_named_with_the_reason(
    error: httpx2.TransportError, told: str
) -> None:
    assert str(await refused(error)) == f"cannot reach http://x/v1/models: {told}"


async def test_a_file_over_the_servers_limit_is_not_sent(tmp_path: Path) -> None:
    await transcribed(tmp_path, stream(DONE), num_bytes=100)
    with pytest.raises(UploadTooLarge, match="The file has 101 bytes, and the server takes 100 bytes"):
        await transcribed(tmp_path, num_bytes=101)


# -- What it streams -----------------------------------------------------------------------------------------


async def test_progress_is_told_with_each_text(tmp_path: Path) -> None:
    reached: list[tuple[float, float | None]] = []
    await transcribed(tmp_path, stream(DELTA, DELTA, DONE), on_progress=lambda *done: reached.append(done))
    assert reached == [(1.5, None)] * 2


@pytest.mark.parametrize(
    "lost",
    [
        httpx2.ReadError("reset"),
        httpx2.RemoteProtocolError("closed"),
        stream(DELTA),
        stream(failed(type="service_unavailable_error")),
        httpx2.Response(500, json=failed()),
    ],
    ids=["reset", "closed", "ends early", "shuts down", "fails"],
)
async def test_what_may_pass_is_tried_again(tmp_path: Path, lost: Answer, waits: list[float]) -> None:
    transcript, _, server = await transcribed(tmp_path, lost, stream(DONE))
    assert (transcript.text, len(server.requests), len(waits)) == ("x", 3, 1)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (httpx2.ReadTimeout("late"), ChunkFailed, "the server has sent nothing for 600 s"),
        (stream(DONE | {"text": None}), ChunkFailed, "1 fields of its last event are not as expected"),
        (stream(failed(type="server_error")), ChunkFailed, "said so"),
        (stream(failed(type="invalid_request_error", param="file")), InvalidAudio, "said so"),
        (httpx2.Response(400, json=failed(param="file")), InvalidAudio, "said so"),
        (httpx2.Response(200, json={}), ChunkFailed, "the server does not answer as an asr-server does"),
    ],
    ids=["silence", "a field", "error", "refusal", "status", "no stream"],
)
async def test_what_does_not_pass_is_told_at_once(
    tmp_path: Path, answer: Answer, kind: type[Exception], told: str, waits: list[float]
) -> None:
    with pytest.raises(kind, match=told):
        await transcribed(tmp_path, answer)
    assert waits == []
