from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from asr_server.core import Samples
from tests.conftest import Server, run_server
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.api.sample_files import sound_file

KEY = "a/key=with+signs-of-base64=="  # that no WebSocket's subprotocol could carry


@pytest.fixture(scope="session")
def locked_server() -> Iterator[Server]:
    """Asks for KEY."""
    with run_server("--api-key", KEY) as server:
        yield server


@pytest.fixture
async def app() -> AsyncIterator[RunningApp]:
    async with run_app() as opened:
        yield opened


def strict_client(url: str) -> AsyncOpenAI:
    """The official client, which refuses answers that are not as OpenAI's API describes them."""
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=100,
        _strict_response_validation=True,
    )


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with strict_client(server.url) as client:
        yield client


async def post_speech(http: httpx.AsyncClient, samples: Samples, **fields: Any) -> httpx.Response:
    reply = await http.post(
        "/v1/audio/transcriptions",
        files={"file": ("speech.flac", sound_file(samples, "FLAC"))},
        data={"model": "whisper-1"} | fields,
        timeout=3600,
    )
    assert reply.status_code == 200, reply.text
    return reply
