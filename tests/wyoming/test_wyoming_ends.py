"""How connections end: by an error, by the server, or behind all that a client still sends."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.api.running_app import run_app, until
from tests.embedded import embedded
from tests.wyoming.wyoming_client import (
    FORMAT,
    SECOND,
    WyomingConnection,
    WyomingServer,
    answers_to,
    client_at,
    door,
    event_of,
    next_event,
    wire,
)


class Large(bytes):
    """Some input that says that it has 16 MiB."""

    def __len__(self) -> int:
        return 16 << 20


async def test_64_mebibytes_of_further_input_are_let_pass() -> None:
    asked: list[int] = []

    async def read(num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return Large(b"x")

    connection = WyomingConnection(
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(read=read),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    await connection._let_pass(60.0)
    assert asked == [65_536] * 4


async def test_a_server_that_closes_ends_idle_connections_and_takes_no_more() -> None:
    async with run_app(replace(embedded(), wyoming_port=0)) as app:
        server = WyomingServer(app.app.state.server)
        await server.close()  # before it has listened
        _, port = await server.start()
        async with client_at(port) as idle:
            await until(lambda: server.connections)
            await server.close()
            assert await next_event(idle) is None
        assert not server.connections
        with pytest.raises(OSError, match="Connect"):
            await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("is_expected", [True, False])
async def test_an_error_is_a_line_and_a_mistake_of_ours_has_its_traceback(
    is_expected: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    caplog.set_level(logging.INFO, logger="asr_server.wyoming")
    if not is_expected:
        monkeypatch.setattr(WyomingConnection, "_handle", broken)
    async with door() as (_, port):
        (error,) = await answers_to(port, b"junk\n" if is_expected else wire("ping"))
    assert error.data["code"] == ("invalid_value" if is_expected else "server_error")
    assert "secret" not in error.data["text"]
    (line,) = [record for record in caplog.records if record.name == "asr_server.wyoming"]
    assert line.getMessage().startswith("wyoming: refused: ")
    assert (line.levelno, line.exc_info is None) == (
        (logging.INFO, True) if is_expected else (logging.ERROR, False)
    )


async def test_a_client_that_leaves_within_an_utterance_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.wyoming")
    async with door() as (_, port):
        async with client_at(port) as client:
            await client.write_event(event_of("audio-start", **FORMAT))
            await client.write_event(event_of("audio-chunk", SECOND, **FORMAT))
        await until(lambda: caplog.messages)
    assert caplog.messages == ["wyoming: the client has left, or does not read"]
