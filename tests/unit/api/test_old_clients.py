"""Clients that offer another protocol, as `curl --http2` and Java's do."""

import pytest

from tests.support.raw_client import RawClient
from tests.unit.api.running_app import SECOND, RunningApp

UPGRADE = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}


async def test_an_upload_that_offers_http2_is_transcribed(app: RunningApp) -> None:
    for _ in range(2):  # the connection is kept
        reply = await app.client.post(
            "/v1/audio/transcriptions", files={"file": SECOND}, data={"model": "whisper-1"}, headers=UPGRADE
        )
        assert reply.json()["text"] == "zero"


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_a_chunked_body_behind_an_offer_is_read_however_it_comes(app: RunningApp, size: int) -> None:
    head = "POST /v1/realtime/client_secrets HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in UPGRADE.items())
    data = f"{head}\r\n2\r\n{{}}\r\n0\r\n\r\nGET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()
    client = await RawClient.connect(app.host, app.port)
    for at in range(0, len(data), size):
        client.send(data[at : at + size])
        await client.writer.drain()
    assert (await client.reply()).status == 200
    assert (await client.reply()).status == 200
    await client.close()
