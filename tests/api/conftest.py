from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.api.running_app import RunningApp, run_app
from tests.conftest import Server


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
