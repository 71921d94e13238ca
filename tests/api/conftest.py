from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.api.house import House, open_house
from tests.conftest import Server


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with open_house() as opened:
        yield opened


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=100,
        _strict_response_validation=True,
    ) as client:
        yield client
