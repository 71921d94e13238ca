"""How a server stops while it has work: signals to one process and to the group."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

import httpx
import psutil
import pytest

from tests.conftest import STOP_LIMIT_S, WITHOUT_ENGINE, Server, run_server
from tests.support.raw_client import RawClient
from tests.support.speech import VOICES, say
from tests.support.until import until
from tests.unit.api.sample_files import m4a, sound_file
from tests.unit.api.test_websockets import handshake
from tests.unit.realtime.realtime_client import of_type, open_manual, pcm24

PATH = "/v1/audio/transcriptions"
SAID = [say("31415926", voice, 0.2).samples for voice in VOICES[:4]]
FILES = [m4a(SAID[0]), sound_file(SAID[1]), m4a(SAID[2]), sound_file(SAID[3], "FLAC")]


class HeldUpload:
    """A request whose headers the server has read; its body is sent by `finish`."""

    def __init__(self, client: RawClient, body: bytes) -> None:
        self.client, self._body = client, body

    @classmethod
    async def begin(cls, server: Server, file: bytes = FILES[0]) -> HeldUpload:
        address = httpx.URL(server.url)
        client = await RawClient.connect(address.host, address.port or 0)
        request = httpx.Request("POST", server.url + PATH, files={"file": file})
        body = request.read()
        client.send(
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
            f"content-type: {request.headers['content-type']}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        )
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        return cls(client, body)

    async def finish(self) -> str:
        self.client.send(self._body)
        reply = await self.client.reply()
        await self.client.close()
        text: str = json.loads(reply.body)["text"]
        return text


async def texts_of(held: list[HeldUpload]) -> list[str]:
    return await asyncio.gather(*(each.finish() for each in held))


@pytest.mark.parametrize(
    "stop", [pytest.param(os.kill, id="one"), pytest.param(os.killpg, id="group", marks=pytest.mark.trial)]
)
async def test_a_stop_lets_all_in_flight_finish(stop: Callable[[int, int], None]) -> None:
    with run_server("--dtype", "float32", "--drain-s", "100") as server:
        family = [server.process, *psutil.Process(server.process.pid).children(recursive=True)]
        undisturbed = await texts_of([await HeldUpload.begin(server, file) for file in FILES])
        held = [await HeldUpload.begin(server, file) for file in FILES * 2]
        stop(server.process.pid, signal.SIGTERM)
        await until(lambda: server.get("/ready").status_code == 503)
        async with httpx.AsyncClient(base_url=server.url) as late:
            reply = await late.post(PATH)  # without a body, which the close might meet on its way
        assert (reply.status_code, reply.headers["connection"]) == (503, "close")
        assert reply.headers["retry-after"].isdecimal()
        assert await texts_of(held) == undisturbed * 2
        assert server.process.wait(STOP_LIMIT_S) == 0
        assert "draining: 8 requests in flight have 100 s to finish" in server.written()
        assert "no request is left" in server.written()
        assert "exited with status" not in server.written()
        assert "was killed" not in server.written()
        assert "Traceback" not in server.written()
        assert not [member for member in family[1:] if psutil.pid_exists(member.pid)]


async def test_a_second_signal_hurries() -> None:
    with run_server(*WITHOUT_ENGINE, "--drain-s", "300") as server:
        held = await HeldUpload.begin(server)
        server.process.terminate()
        await until(lambda: "draining" in server.written())
        server.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(server.process.wait, STOP_LIMIT_S) == 0
        await held.client.close()
        assert "1 requests unfinished" in server.written()
        assert "Traceback" not in server.written()


async def test_a_socket_that_answers_no_close_does_not_hold_up_the_stop() -> None:
    with run_server(*WITHOUT_ENGINE, "--drain-s", "600") as server:
        address = httpx.URL(server.url)
        assert address.port is not None
        client = await RawClient.connect(address.host, address.port)
        client.send(handshake())
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        server.process.terminate()
        assert await asyncio.to_thread(server.process.wait, STOP_LIMIT_S) == 0
        assert "Traceback" not in server.written()
        await client.close()


async def test_a_live_turn_that_cannot_finish_in_time_is_told_so_before_its_session_closes() -> None:
    with run_server("--drain-s", "1") as server:
        replicas = psutil.Process(server.process.pid).children(recursive=True)
        async with open_manual(server.url) as client:
            await client.append(pcm24(say("31").samples))
            for replica in replicas:
                replica.suspend()
            await client.commit()
            await client.until(".committed")
            server.process.terminate()
            (failed,) = of_type(await client.until(".failed"), ".failed")
            assert failed["error"]["message"]
            assert await client.closed() == 1012
