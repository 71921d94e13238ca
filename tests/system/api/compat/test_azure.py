"""Azure's routes, by OpenAI's own client for Azure."""

import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI

from tests.conftest import Server
from tests.support.embedded import embedded
from tests.support.fake_replica import noise
from tests.support.speech import say
from tests.unit.api.running_app import run_app
from tests.unit.api.sample_files import sound_file

SPOKEN = say("314")


def azure_client(url: str, key: str = "none") -> AsyncAzureOpenAI:
    return AsyncAzureOpenAI(azure_endpoint=url, api_key=key, api_version="2026-06-01", max_retries=0)


async def test_a_deployment_is_a_name_of_the_model(server: Server) -> None:
    async with azure_client(server.url) as client:
        answer = await client.audio.transcriptions.create(
            file=("a.wav", sound_file(SPOKEN.samples)), model="whisper-1"
        )
        assert answer.text == SPOKEN.text
        with pytest.raises(openai.NotFoundError, match="'whisper-of-ours' does not exist"):
            await client.audio.transcriptions.create(
                file=("a.wav", sound_file(SPOKEN.samples)), model="whisper-of-ours"
            )


async def test_the_newer_routes_take_the_model_as_a_field(server: Server) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/openai/v1/", api_key="none") as client:
        answer = await client.audio.transcriptions.create(
            file=("a.wav", sound_file(SPOKEN.samples)), model="whisper-1"
        )
        assert answer.text == SPOKEN.text


async def test_the_key_comes_in_a_header_of_its_own() -> None:
    async with run_app(embedded(api_key="the-right-key-of-azure")) as app:
        url = app.url
        file = ("a.wav", sound_file(noise(1.0)))
        async with azure_client(url, "the-right-key-of-azure") as client:
            assert await client.audio.transcriptions.create(file=file, model="whisper-1")
        async with azure_client(url, "another") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.audio.transcriptions.create(file=file, model="whisper-1")
