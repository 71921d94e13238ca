"""What a key may use: counted in buckets, shown in headers as OpenAI does, refused with 429."""

import asyncio
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from asr_server.annexes.keys.accounts import Account, Key, format_duration
from asr_server.api.schemas import LIMIT_HEADERS
from asr_server.errors import RateLimited
from tests.contract.official_client import transcribe
from tests.support.fake_replica import noise
from tests.support.until import until
from tests.unit.api.named_keys import SHOP, WEB, bearer, entry, hash_of, official, settings_with
from tests.unit.api.running_app import SECOND, THREE_CHUNKS, RunningApp, run_app
from tests.unit.api.test_state_admission import Clock
from tests.unit.realtime.realtime_client import MANUAL, open_session, pcm24, refused


def account(clock: Clock, **limits: Any) -> Account:
    return Account(Key("web", hash_of(WEB), **limits), clock)


def send(account: Account, count: int = 1) -> None:
    for _ in range(count):
        with account.enter():
            pass


def wait_s(account: Account) -> float:
    with pytest.raises(RateLimited) as caught:
        send(account)
    return caught.value.retry_after_s


def shown(account: Account, unit: str = "requests") -> list[str]:
    return [account.headers()[f"x-ratelimit-{part}-{unit}"] for part in ("limit", "remaining", "reset")]


def test_a_minutes_requests_may_come_at_once_and_come_back_evenly() -> None:
    clock = Clock()
    web = account(clock, requests_per_minute=30)
    send(web)
    assert shown(web) == ["30", "29", "2s"]
    send(web, 29)
    assert shown(web) == ["30", "0", "1m0s"]
    assert wait_s(web) == pytest.approx(2)
    clock.now_s += 2
    send(web)
    assert wait_s(web) == pytest.approx(2)
    clock.now_s += 3600
    assert shown(web) == ["30", "30", "0ms"]


def test_a_request_that_is_refused_uses_nothing() -> None:
    clock = Clock()
    web = account(clock, requests_per_minute=1)
    send(web)
    assert [wait_s(web) for _ in range(9)] == pytest.approx([60] * 9)


def test_audio_beyond_the_limit_is_paid_back_before_the_next_request() -> None:
    clock = Clock()
    web = account(clock, audio_seconds_per_minute=60)
    send(web)
    web.spend_audio(90)
    assert shown(web, "audio-seconds") == ["60", "0", "1m30s"]
    assert wait_s(web) == pytest.approx(31)  # until one second is left
    clock.now_s += 31
    send(web)


def test_a_changed_limit_keeps_what_was_used() -> None:
    web = account(Clock(), requests_per_minute=60)
    send(web, 40)
    web.set_key(Key("web", hash_of(WEB), requests_per_minute=50))
    assert shown(web)[:2] == ["50", "10"]
    web.set_key(Key("web", hash_of(WEB)))
    send(web, 100)
    web.set_key(Key("web", hash_of(WEB), requests_per_minute=50))
    assert shown(web)[:2] == ["50", "50"]


@pytest.mark.parametrize(
    ("duration_s", "words"),
    [
        (0, "0ms"),
        (0.0196, "20ms"),
        (0.5, "500ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.999, "1m0s"),
        (360, "6m0s"),
        (90.5, "1m30.5s"),
    ],
)
def test_durations_are_written_as_openai_does(duration_s: float, words: str) -> None:
    assert format_duration(duration_s) == words


# -- By the official client ----------------------------------------------------------------------------------


async def limit_headers(app: RunningApp, key: str) -> dict[str, str]:
    async with official(app, key) as client:
        create = client.audio.transcriptions.with_raw_response.create
        raw = await create(file=("a.wav", SECOND), model="whisper-1")
    return {name: value for name, value in raw.headers.items() if name in LIMIT_HEADERS}


async def text(app: RunningApp, key: str, max_retries: int = 0) -> str:
    async with official(app, key, max_retries) as client:
        return str((await transcribe(client, SECOND)).text)


async def refusal_of(app: RunningApp, key: str) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as caught:
        await text(app, key)
    return caught.value


async def test_a_key_over_its_requests_alone_gets_429_with_openais_headers(tmp_path: Path) -> None:
    web = entry("web", WEB, requests_per_minute=2, audio_seconds_per_minute=60)
    async with run_app(settings_with(tmp_path / "keys", web, entry("shop", SHOP))) as app:
        first = await limit_headers(app, WEB)
        assert set(first) == set(LIMIT_HEADERS)
        assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-remaining-requests"]) == ("2", "1")
        assert first["x-ratelimit-remaining-audio-seconds"] == "59"
        assert (await limit_headers(app, WEB))["x-ratelimit-remaining-requests"] == "0"
        error = await refusal_of(app, WEB)
        assert (error.code, error.type, error.param) == ("rate_limit_exceeded", "rate_limit_error", None)
        assert "'requests_per_minute' in --keys-file (ASR_SERVER_KEYS_FILE)" in error.message
        headers = error.response.headers
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"5\d(\.\d+)?s|1m0s", headers["x-ratelimit-reset-requests"])
        assert 1 <= int(headers["retry-after"]) <= 60
        assert await limit_headers(app, SHOP) == {}
        models = await app.client.get("/v1/models", headers=bearer(WEB))
        assert (models.status_code, set(models.headers) & set(LIMIT_HEADERS)) == (200, set())
        assert app.app.state.server.admission.num_rejected == 0


async def test_a_key_over_its_audio_is_refused_until_it_has_paid_back(tmp_path: Path) -> None:
    web = entry("web", WEB, audio_seconds_per_minute=60)
    async with run_app(settings_with(tmp_path / "keys", web)) as app:
        app.client.headers.update(bearer(WEB))
        whole = await app.post(THREE_CHUNKS)
        assert whole.headers["x-ratelimit-remaining-audio-seconds"] == "0"
        error = await refusal_of(app, WEB)
        assert error.code == "rate_limit_exceeded"
        assert "60 seconds of audio a minute" in error.message
        assert error.response.headers["x-ratelimit-reset-audio-seconds"].startswith("1m")


async def test_a_key_over_its_requests_at_once_is_refused_until_one_has_ended(tmp_path: Path) -> None:
    web = entry("web", WEB, concurrent_requests=1)
    async with run_app(settings_with(tmp_path / "keys", web, entry("shop", SHOP))) as app:
        app.replica.holding = True
        first = asyncio.create_task(text(app, WEB))
        await until(lambda: app.replica.held)
        assert "1 requests at once" in (await refusal_of(app, WEB)).message
        app.replica.holding = False
        assert await text(app, SHOP) == "zero"
        app.replica.release(app.replica.held[0])
        await first
        assert await text(app, WEB) == "zero"


async def test_a_stream_and_the_routes_of_other_servers_count_too(tmp_path: Path) -> None:
    web = entry("web", WEB, requests_per_minute=3)
    async with run_app(settings_with(tmp_path / "keys", web)) as app:
        app.client.headers.update(bearer(WEB))
        stream = await app.post(stream="true")
        assert stream.headers["x-ratelimit-remaining-requests"] == "2"
        azure = "/openai/deployments/whisper-1/audio/transcriptions"
        reply = await app.client.post(azure, files={"file": SECOND}, headers={"api-key": WEB})
        assert reply.headers["x-ratelimit-remaining-requests"] == "1"
        reply = await app.client.post("/inference", files={"file": SECOND})
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
        for path in ("/inference", "/v1/audio/translations"):
            assert (await app.post(path=path)).json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_session_counts_as_a_request_and_ends_when_the_audio_is_used_up(tmp_path: Path) -> None:
    web = entry("web", WEB, requests_per_minute=1, audio_seconds_per_minute=2)
    async with run_app(settings_with(tmp_path / "keys", web, entry("shop", SHOP))) as app:
        url = app.url
        async with open_session(url, additional_headers=bearer(WEB)) as client:
            await client.update(**MANUAL)
            await client.say(pcm24(noise(3)))
            error = (await client.until("error"))[-1]["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert await client.closed() == 1008
        refusal = await refused(url, additional_headers=bearer(WEB))
        assert (refusal.status, refusal.headers["x-ratelimit-remaining-requests"]) == (429, "0")
        why = await app.client.get("/v1/realtime", headers=bearer(WEB))
        assert (why.status_code, why.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        async with open_session(url, additional_headers=bearer(SHOP)):
            pass
