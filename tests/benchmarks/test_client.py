from __future__ import annotations

import asyncio

import pytest

from benchmarks.client import RefusedError, connected, transcribe
from benchmarks.uploads import wav
from tests.conftest import Server
from tests.speech import digits_of, say


async def test_an_answer_has_its_text_and_its_tokens_and_the_connection_is_used_again(server: Server) -> None:
    said = say("417")
    async with connected(server.url) as client:
        for _ in range(2):
            answer = await transcribe(client, "417.wav", wav(said.samples), {"language": "en"})
            assert digits_of(answer.text) == "417"
            assert answer.num_tokens >= 3
            assert 0 < answer.first_text_s <= answer.total_s
            assert len(client.idle) == 1


async def test_a_refusal_is_raised_with_its_reason(server: Server) -> None:
    async with connected(server.url) as client:
        with pytest.raises(RefusedError, match=r"400: .*temperature"):
            await transcribe(client, "1.wav", wav(say("1").samples), {"temperature": "hot"})


async def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again() -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(f"http://127.0.0.1:{port}") as client:
            for _ in range(3):
                assert await client.get_json("/") == {}
                async with asyncio.timeout(60):
                    while not client.idle[0].is_closed_by_server:
                        await asyncio.sleep(0.01)
