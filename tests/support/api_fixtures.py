from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from tests.conftest import Server, run_server
from tests.unit.api.running_app import RunningApp, run_app

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


def strict_client(server: Server) -> AsyncOpenAI:
    """The official client, which refuses answers that are not as OpenAI's API describes them."""
    return AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=100,
        _strict_response_validation=True,
    )


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with strict_client(server) as client:
        yield client
