"""Calls back: signed as OpenAI's client checks it, tried again, and never to a private address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from asr_server.annexes.jobs import callbacks
from tests.unit.api.running_app import error_of
from tests.unit.jobs.jobs_app import URL, finished, post, run_with_jobs

SECRET = "whsec_" + "c2VjcmV0" * 4


class Receiver:
    def __init__(self, *statuses: int) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.url = ""
        self._statuses = list(statuses)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head)}
        self.received.append((headers, await reader.readexactly(int(headers["content-length"]))))
        status = self._statuses.pop(0) if self._statuses else 200
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def receiver(*statuses: int) -> AsyncIterator[Receiver]:
    answering = Receiver(*statuses)
    server = await asyncio.start_server(answering.answer, "127.0.0.1", 0)
    answering.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    async with server:
        yield answering


async def reported(tmp_path: Path, *statuses: int) -> tuple[Receiver, dict[str, Any]]:
    settings: dict[str, Any] = {"callback_hosts": "127.0.0.1", "callback_secret": SECRET}
    async with receiver(*statuses) as answering, run_with_jobs(tmp_path, **settings) as app:
        id = (await post(app, callback_url=answering.url)).json()["id"]
        await finished(app, id)
        while True:
            callback: dict[str, Any] = (await app.client.get(f"{URL}/{id}")).json()["callback"]
            if callback["state"] != "pending":
                return answering, callback
            await asyncio.sleep(0.005)


async def test_the_official_client_accepts_what_is_sent_with_id_and_status_only(tmp_path: Path) -> None:
    answering, callback = await reported(tmp_path)
    [(headers, body)] = answering.received
    with OpenAI(api_key="none", webhook_secret=SECRET) as client:
        event: Any = client.webhooks.unwrap(body, headers)
    assert event.type == "transcription.completed"
    assert event.data.status == "completed"
    assert [each["status"] for each in callback["tries"]] == [200]


@pytest.mark.parametrize(
    ("statuses", "num_tries", "state"),
    [((500, 302, 200), 3, "delivered"), ((404,), 1, "failed"), ((503,) * 20, 10, "failed")],
)
async def test_it_is_tried_until_taken_refused_or_ten_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[int, ...], num_tries: int, state: str
) -> None:
    monkeypatch.setattr(callbacks, "FIRST_PAUSE_S", 1e-6)
    answering, callback = await reported(tmp_path, *statuses)
    assert (len(answering.received), callback["state"]) == (num_tries, state)
    assert len({headers["webhook-id"] for headers, _ in answering.received}) == 1
    assert [each["status"] for each in callback["tries"]] == [*statuses][:num_tries]


PRIVATE = ("127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0")


@pytest.mark.parametrize(
    ("hosts", "url"),
    [
        ("", "https://hooks.example.com/"),
        ("hooks.example.com", "https://example.com/"),
        ("hooks.example.com", "https://user:secret@hooks.example.com/"),
        ("hooks.example.com", "file://hooks.example.com/etc/passwd"),
        *(("*", f"http://{host}:8000/") for host in PRIVATE),
    ],
)
async def test_hosts_that_nobody_allowed_are_refused(tmp_path: Path, hosts: str, url: str) -> None:
    async with run_with_jobs(tmp_path, callback_hosts=hosts, callback_secret=SECRET) as app:
        error = error_of(await post(app, callback_url=url))
        assert (error["code"], error["param"]) == ("invalid_value", "callback_url")
