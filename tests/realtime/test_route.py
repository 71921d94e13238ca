"""What a client gets when its session fails, on a server in this process."""

from __future__ import annotations

import pytest

from asr_server.core import Samples
from asr_server.realtime.audio_in import AudioInput
from asr_server.realtime.session import INTERNAL_ERROR
from tests.api.running_app import RunningApp, until
from tests.fake_replica import noise
from tests.realtime.realtime_client import open_session, pcm24

URL = "http://{0.host}:{0.port}"


async def test_a_session_that_fails_says_so_closes_with_1011_and_leaves_its_place(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(audio: AudioInput, data: bytes) -> Samples:
        raise RuntimeError("a secret of the server")

    sessions = app.app.state.server.realtime
    with monkeypatch.context() as patched:
        patched.setattr(AudioInput, "push", fail)
        async with open_session(URL.format(app)) as client:
            await client.append(pcm24(noise(0.1)))
            event = await client.receive()
            assert (event["type"], event["error"]["type"]) == ("error", "server_error")
            assert "secret" not in str(event)
            assert await client.closed() == INTERNAL_ERROR
            assert client.socket.close_reason == "The server had an error."
        await until(lambda: sessions.num_active == 0)
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]
    async with open_session(URL.format(app)) as client:
        await client.update()
