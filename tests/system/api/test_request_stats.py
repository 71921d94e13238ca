"""What explains a slow file: fallbacks, what was read again and dropped, in `/metrics` and in the log."""

import asyncio
import json
import logging
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from asr_server.core import ChunkResult
from asr_server.telemetry import JsonFormatter
from asr_server.transport.messages import Submit
from tests.conftest import Server
from tests.support.fake_replica import noise, say, wav
from tests.support.raw_client import RawClient
from tests.support.speech import say as speak
from tests.support.speech import silence
from tests.support.tokens import words
from tests.support.until import until, wait_until
from tests.unit.api.figures import Figures, figures_of, growth, read
from tests.unit.api.running_app import RunningApp, run_app

ROUTE = "/v1/audio/transcriptions"
REQUEST_LOG = "asr_server.api.middleware"


def read_again(reason: str) -> str:
    return f'asr_chunks_read_again_total{{reason="{reason}"}}'


def audio(language: str, route: str = ROUTE) -> str:
    return f'asr_audio_transcribed_seconds_total{{language="{language}",route="{route}"}}'


def grown(before: Figures, after: Figures, *families: str) -> Figures:
    """What of these families has grown, and by how much."""
    found = {name: growth(before, after, name) for name in after if name.startswith(families)}
    return {name: value for name, value in found.items() if value}


@pytest.fixture(autouse=True)
def requests_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=REQUEST_LOG)


def logged_requests(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == REQUEST_LOG]


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(JsonFormatter("api").format(record))
    return line


def tried_twice_more(submit: Submit) -> ChunkResult:
    return msgspec.structs.replace(say(*words("1")), temperature=0.2, num_fallbacks=2)


async def test_fallbacks_are_counted_by_the_temperature_tried_and_results_by_the_one_kept() -> None:
    async with run_app(answer=tried_twice_more) as app:
        before = await read(app)
        await app.post()
        after = await read(app)
        assert grown(before, after, "asr_fallbacks", "asr_chunks_transcribed") == {
            'asr_fallbacks_total{temperature="0.2"}': 1,
            'asr_fallbacks_total{temperature="0.4"}': 1,
            'asr_chunks_transcribed_total{temperature="0.2"}': 1,
        }


async def test_a_temperature_of_the_clients_own_adds_no_series() -> None:
    def as_asked(submit: Submit) -> ChunkResult:
        return msgspec.structs.replace(say(*words("1")), temperature=submit.options.temperatures[0])

    async with run_app(answer=as_asked) as app:
        before = await read(app)
        for temperature in ("0.31", "0.32"):
            await app.post(temperature=temperature)
        after = await read(app)
        assert grown(before, after, "asr_chunks_transcribed") == {
            'asr_chunks_transcribed_total{temperature="other"}': 2
        }


async def test_a_chunk_that_is_outvoted_counts_and_the_audio_is_the_winners() -> None:
    told = [{"de": 0.5, "en": 0.4, "zh": 0.1}, {"de": 0.02, "en": 0.97, "zh": 0.01}]
    async with run_app(languages=("en", "de", "zh")) as app:
        app.replica.probabilities_of = lambda submit: told[min(submit.id.chunk, 1)]
        before = await read(app)
        await app.post(wav(noise(75)))
        after = await read(app)
    families = ("asr_chunks_read_again", "asr_audio_transcribed")
    assert grown(before, after, *families) == {
        read_again("language_outvoted"): 1,
        audio("en"): pytest.approx(75.0),
    }


async def test_a_chunk_whose_replica_is_lost_counts(app: RunningApp) -> None:
    before = await read(app)
    app.replica.holding = True
    asking = asyncio.create_task(app.post())
    await until(lambda: app.replica.held)
    app.replica.holding = False
    app.replica.die()
    assert (await asking).json()["text"] == "zero"
    assert grown(before, await read(app), "asr_chunks_read_again") == {read_again("replica_lost"): 1}


async def test_audio_is_counted_by_the_route_that_it_came_in_by() -> None:
    async with run_app(languages=("en", "de")) as app:
        app.replica.probabilities = {"de": 0.9, "en": 0.1}
        before = await read(app)
        await app.post(wav(noise(2)))
        reply = await app.post(wav(noise(3)), path="/v1/audio/translations")
        assert reply.status_code == 200, reply.text
        after = await read(app)
    assert grown(before, after, "asr_audio_transcribed") == {
        audio("de"): pytest.approx(2.0),
        audio("de", "/v1/audio/translations"): pytest.approx(3.0),
    }


@pytest.mark.parametrize(
    ("sender", "forwarded", "logged"),
    [
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "203.0.113.9:4000", "203.0.113.9"),
        ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("127.0.0.1", "nobody", ""),
        ("127.0.0.1", "fe80::1%x y", "fe80::1"),
        ("127.0.0.1", "x" * 5000, ""),
        ("127.0.0.2", "203.0.113.9", "127.0.0.2"),
    ],
)
async def test_a_forwarded_address_counts_from_a_trusted_proxy_and_if_it_is_one(
    sender: str, forwarded: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_app() as app:
        client = await RawClient.connect(app.host, app.port, address=sender)
        head = f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-forwarded-for: {forwarded}\r\n\r\n"
        client.send(head.encode())
        assert (await client.reply()).status == 200
        await client.close()
    assert line_of(*logged_requests(caplog)).get("client", "") == logged


async def test_a_requests_line_tells_what_it_took(caplog: pytest.LogCaptureFixture) -> None:
    async with run_app(answer=tried_twice_more) as app:
        await app.post(wav(noise(75)))
        await app.client.get("/v1/models")
    heard, listed = logged_requests(caplog)
    assert heard.getMessage().endswith(" s; audio 75.0 s, chunks 3, fallbacks 6")
    line = line_of(heard)
    expected = {
        "method": "POST",
        "route": ROUTE,
        "status": 200,
        "client": "127.0.0.1",
        "model": "whisper-1",
        "format": "json",
        "stream": False,
        "audio_s": 75.0,
        "languages": {"en": 75.0},
        "chunks": 3,
        "fallbacks": {"0.2": 3, "0.4": 3},
    }
    assert line.items() >= expected.items()
    stages_s = line["stages_s"]
    # This replica tells no times of chunks.
    assert set(stages_s) == {"upload", "transcription", "render", "reply"}
    assert 0 < sum(stages_s.values()) <= line["seconds"] + 0.002
    assert "chunks" not in line_of(listed)
    assert listed.getMessage().endswith(" s")


@pytest.mark.parametrize("wrong", [{"model": "gpt-9"}, {"language": "xx"}, {}])
async def test_a_refused_requests_line_says_as_much_as_was_known(
    wrong: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with run_app() as app:
        await app.post(b"no audio", **wrong)
    line = line_of(*logged_requests(caplog))
    asked_for = {"model": wrong.get("model", "whisper-1"), "format": "json", "stream": False}
    assert line.items() >= (asked_for | {"route": ROUTE}).items()
    assert 400 <= line["status"] < 500
    assert "audio_s" not in line


async def test_requests_at_once_have_own_sums(app: RunningApp, caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.gather(*(app.post(wav(noise(duration_s))) for duration_s in (1, 2, 3, 40)))
    lines = [record.getMessage() for record in logged_requests(caplog)]
    assert sorted(line.split("; ")[1] for line in lines) == [
        "audio 1.0 s, chunks 1",
        "audio 2.0 s, chunks 1",
        "audio 3.0 s, chunks 1",
        "audio 40.0 s, chunks 2",
    ]


def test_the_real_server_tells_of_speech_that_the_model_has_passed_over(server: Server) -> None:
    """The embedded model takes what comes behind a long pause for silence."""
    sound = np.concatenate([speak("31").samples, silence(2.4), speak("8").samples])
    before = figures_of(server.get("/metrics"))
    reply = httpx.post(
        server.url + ROUTE,
        files={"file": wav(sound)},
        data={"model": "whisper-1"},
        headers={"x-request-id": "passed-over"},
        timeout=60,
    )
    assert reply.json()["text"] == "three one eight"
    assert reply.headers["x-request-id"] == "passed-over"
    after = figures_of(server.get("/metrics"))
    assert growth(before, after, read_again("speech_passed_over")) == 1
    assert growth(before, after, audio("en")) == pytest.approx(len(sound) / 16_000, abs=0.01)
    wait_until(lambda: any("passed-over] " in line and "read again 1" in line for line in server.lines()))
