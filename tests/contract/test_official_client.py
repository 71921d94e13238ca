"""The official Python client, strict: each way to give a file, the class of each error, what is sent again.

The formats and streams are in test_end_to_end.py, realtime sessions in realtime/test_official_client.py.
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from asr_server.errors import ChunkFailed
from asr_server.transport.messages import Submit
from tests.conftest import Server
from tests.contract.official_client import SPOKEN
from tests.support.embedded import embedded
from tests.support.until import until
from tests.unit.api.running_app import SECOND, RunningApp, run_app
from tests.unit.api.sample_files import sound_file

pytestmark = pytest.mark.slow

MODEL = "whisper-1"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "speech.wav"
    path.write_bytes(sound_file(SPOKEN.samples))
    return path


FILES: dict[str, Callable[[Path], Any]] = {
    "bytes": lambda path: path.read_bytes(),
    "path": lambda path: path,
    "open-file": lambda path: path.open("rb"),
    "buffer": lambda path: io.BytesIO(path.read_bytes()),
    "name-and-bytes": lambda path: ("speech.wav", path.read_bytes()),
    "name-and-file": lambda path: ("speech", path.open("rb")),
    "with-a-type": lambda path: ("speech.wav", path.read_bytes(), "audio/wav"),
    "with-headers": lambda path: ("a.bin", path.read_bytes(), "application/octet-stream", {"X-Part": "1"}),
}


@pytest.mark.parametrize("kind", FILES)
async def test_a_file_may_be_given_in_each_way(client: AsyncOpenAI, recording: Path, kind: str) -> None:
    file = FILES[kind](recording)
    try:
        answer = await client.audio.transcriptions.create(file=file, model=MODEL)
    finally:
        for part in file if isinstance(file, tuple) else [file]:
            if isinstance(part, io.IOBase):
                part.close()
    assert answer.text == SPOKEN.text


def test_the_synchronous_client_transcribes_and_streams(server: Server, recording: Path) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True) as client:
        transcriptions = client.audio.transcriptions
        assert transcriptions.create(file=recording, model=MODEL).text == SPOKEN.text
        *deltas, done = transcriptions.create(file=recording, model=MODEL, stream=True)
        assert "".join(delta.delta for delta in deltas) == done.text == SPOKEN.text  # type: ignore[union-attr]
        raw = transcriptions.with_raw_response.create(file=recording, model=MODEL)
        assert raw.headers["x-request-id"] == raw.request_id


# -- Refusals ------------------------------------------------------------------------------------------------


class Attempts:
    """A client that notes when it sends."""

    def __init__(self, app: RunningApp, max_retries: int, api_key: str = "none") -> None:
        self.times: list[float] = []
        self._client = AsyncOpenAI(
            base_url=f"{app.url}/v1",
            api_key=api_key,
            max_retries=max_retries,
            http_client=DefaultAsyncHttpxClient(event_hooks={"request": [self._note]}),
            _strict_response_validation=True,
        )

    async def _note(self, request: httpx2.Request) -> None:
        self.times.append(time.monotonic())

    async def transcribe(self, file: bytes = SECOND, model: str = MODEL) -> str:
        async with self._client as client:
            return (await client.audio.transcriptions.create(file=file, model=model)).text


@asynccontextmanager
async def app_with(**settings: Any) -> AsyncIterator[RunningApp]:
    async with run_app(replace(embedded(), **settings)) as app:
        yield app


async def test_what_the_sender_must_mend_is_not_sent_again() -> None:
    async with app_with(api_key="secret", max_upload_bytes=1 << 16) as app:
        cases: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
            (openai.AuthenticationError, "wrong", {}),
            (openai.NotFoundError, "secret", {"model": "nobody"}),
            (openai.BadRequestError, "secret", {"file": b"no audio"}),
            (openai.APIStatusError, "secret", {"file": bytes(1 << 17)}),
        ]
        for kind, api_key, fields in cases:
            client = Attempts(app, max_retries=2, api_key=api_key)
            with pytest.raises(kind) as caught:
                await client.transcribe(**fields)
            assert type(caught.value) is kind
            assert caught.value.request_id
            assert len(client.times) == 1


@asynccontextmanager
async def full_app() -> AsyncIterator[RunningApp]:
    """A server whose one place is taken, as is its line; both are freed at the end."""
    async with app_with(max_concurrent_requests=1) as app:
        app.replica.holding = True
        inside = [asyncio.create_task(app.post()) for _ in range(2)]
        await until(lambda: app.replica.held and app.app.state.server.admission.num_waiting)
        yield app
        app.replica.stop_holding()
        assert [(await each).status_code for each in inside] == [200, 200]


async def test_a_429_is_sent_again_when_the_server_said() -> None:
    async with full_app() as app:
        client = Attempts(app, max_retries=2)
        asking = asyncio.create_task(client.transcribe())
        await until(lambda: app.app.state.server.admission.num_rejected)
        app.replica.stop_holding()
        assert await asking == "zero"
    first_at, second_at = client.times
    assert second_at - first_at >= 0.9  # a second, at least


async def test_a_fault_of_the_server_is_an_internal_server_error_and_is_tried_again() -> None:
    def fail(submit: Submit) -> Exception:
        return ChunkFailed("a secret")

    async with run_app(answer=fail) as app:
        client = Attempts(app, max_retries=1)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.transcribe()
    assert (caught.value.status_code, caught.value.type) == (500, "server_error")
    assert "secret" not in str(caught.value)
    assert len(client.times) == 2
