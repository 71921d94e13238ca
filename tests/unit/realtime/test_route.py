"""Who may open a session and with what settings, and what a client gets when its session fails."""

import time
from typing import Any

import pytest

from asr_server.annexes.realtime.audio_in import AudioInput
from asr_server.annexes.realtime.session import INTERNAL_ERROR
from asr_server.core import Samples
from tests.support.embedded import embedded
from tests.support.fake_replica import noise
from tests.support.until import until
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.realtime.realtime_client import MANUAL, open_session, pcm24, refused

SECRETS = "/v1/realtime/client_secrets"


async def test_a_session_that_fails_says_so_closes_with_1011_and_leaves_its_place(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(audio: AudioInput, data: bytes) -> Samples:
        raise RuntimeError("a secret of the server")

    sessions = app.app.state.server.realtime
    with monkeypatch.context() as patched:
        patched.setattr(AudioInput, "push", fail)
        async with open_session(app.url) as client:
            await client.append(pcm24(noise(0.1)))
            event = await client.receive()
            assert (event["type"], event["error"]["type"]) == ("error", "server_error")
            assert "secret" not in str(event)
            assert await client.closed() == INTERNAL_ERROR
            assert client.socket.close_reason == "The server had an error."
        await until(lambda: sessions.num_active == 0)
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]
    async with open_session(app.url) as client:
        await client.update()


async def test_a_wrong_key_is_401_before_the_handshake_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer ek_wrong"}):
            refusal = await refused(app.url, additional_headers=headers | {"x-request-id": "mine"})
            assert (refusal.status, refusal.error["code"]) == (401, "invalid_api_key")
            assert refusal.headers["x-request-id"] == "mine"
        await until(lambda: not app.server.server_state.tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_plain_get_gives_the_reason_that_a_page_cannot_see() -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        path = "/v1/realtime"
        assert (await app.client.get(path)).json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer s3cret"}
        assert (await app.client.get(path, params={"model": "x"}, headers=headers)).status_code == 404
        assert (await app.client.get(path, headers=headers)).status_code == 426


async def test_the_key_may_come_in_the_header_or_as_a_subprotocol_or_as_a_client_secret() -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        async with open_session(app.url, additional_headers={"Authorization": "Bearer s3cret"}):
            pass
        protocols = ["realtime", "openai-insecure-api-key.s3cret"]
        async with open_session(app.url, subprotocols=protocols) as client:
            assert client.socket.subprotocol == "realtime"
        app.client.headers["authorization"] = "Bearer s3cret"
        session = {"type": "transcription", "audio": {"input": MANUAL}}
        made = (await app.client.post("/v1/realtime/client_secrets", json={"session": session})).json()
        assert made["value"].startswith("ek_")
        assert made["session"]["audio"]["input"]["turn_detection"] is None
        headers = {"Authorization": f"Bearer {made['value']}"}
        async with open_session(app.url, additional_headers=headers) as client:
            assert (await client.update())["session"]["audio"]["input"]["turn_detection"] is None


async def test_a_client_secret_that_no_handshake_can_carry_is_refused_at_creation(app: RunningApp) -> None:
    statuses = {}
    for length in (5_000, 6_000):
        session = {"type": "transcription", "audio": {"input": {"transcription": {"prompt": "a" * length}}}}
        made = await app.client.post("/v1/realtime/client_secrets", json={"session": session})
        statuses[length] = made.status_code
        if made.status_code == 200:
            protocols = ["realtime", f"openai-insecure-api-key.{made.json()['value']}"]
            async with open_session(app.url, subprotocols=protocols):
                pass
    assert statuses == {5_000: 200, 6_000: 400}


async def test_a_key_of_the_server_may_begin_as_client_secrets_do() -> None:
    async with run_app(embedded(api_key="ek_mine")) as app:
        async with open_session(app.url, additional_headers={"Authorization": "Bearer ek_mine"}):
            pass
        assert (await refused(app.url, additional_headers={"Authorization": "Bearer ek_yours"})).status == 401


async def test_a_client_secret_is_asked_for_with_the_key_and_right_fields() -> None:
    async with run_app(embedded(api_key="s3cret")) as app:
        path = "/v1/realtime/client_secrets"
        assert (await app.client.post(path, json={})).status_code == 401
        app.client.headers["authorization"] = "Bearer s3cret"
        wrong_bodies: list[Any] = [
            {"expires_after": {"seconds": 5}},
            {"session": {"type": "realtime"}},
            [],
            {"x": 1},
        ]
        for wrong in wrong_bodies:
            reply = await app.client.post(path, json=wrong)
            assert (reply.status_code, set(reply.json()["error"])) == (
                400,
                {"message", "type", "param", "code"},
            )
        assert (await app.client.post(path)).status_code == 200


@pytest.mark.parametrize(("query", "status"), [("model=nobody", 404), ("intent=conversation", 400)])
async def test_what_is_not_served_is_refused(app: RunningApp, query: str, status: int) -> None:
    refusal = await refused(app.url, f"/v1/realtime?{query}")
    assert (refusal.status, refusal.error["param"]) == (status, query.partition("=")[0])


async def test_a_served_model_may_be_named_in_the_address(app: RunningApp) -> None:
    path = "/v1/realtime?intent=transcription&model=whisper-1"
    async with open_session(app.url, path) as client:
        updated = await client.update()
        assert updated["session"]["audio"]["input"]["transcription"]["model"] == "whisper-1"


async def test_more_sessions_than_allowed_are_503_and_a_place_is_free_again_after_one_has_left() -> None:
    async with run_app(embedded(max_realtime_sessions=1)) as app:
        async with open_session(app.url):
            refusal = await refused(app.url)
            assert (refusal.status, refusal.error["code"]) == (503, "server_overloaded")
            assert int(refusal.headers["retry-after"]) >= 5
            reason = await app.client.get("/v1/realtime")  # by which a page finds out
            assert (reason.status_code, app.app.state.server.realtime.num_rejected) == (503, 1)
        await until(lambda: app.app.state.server.realtime.num_active == 0)
        async with open_session(app.url):
            pass


async def test_while_no_engine_is_ready_it_is_503(app: RunningApp) -> None:
    app.dispatcher.supervisor.replica_states[0].ready = False
    assert (await refused(app.url)).error["code"] == "engine_unavailable"


async def test_a_secret_ends_when_it_was_asked_to_and_describes_its_session(app: RunningApp) -> None:
    for body, duration_s in (({}, 600), ({"expires_after": {"seconds": 7200}}, 7200)):
        before = int(time.time())
        made = (await app.client.post(SECRETS, json=body)).json()
        assert before + duration_s <= made["expires_at"] <= int(time.time()) + duration_s
        session = made["session"]
        assert (session["expires_at"], session["id"][:5]) == (made["expires_at"], "sess_")
        assert session["audio"]["input"]["transcription"] == {"model": "whisper-digits"}
    assert (await app.client.post(SECRETS)).headers["content-type"] == "application/json"
    wrong = {"session": {"audio": {"input": {"transcription": {"language": "klingon"}}}}}
    assert (await app.client.post(SECRETS, json=wrong)).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{" + b" " * (256 * 1024 - 2) + b"}", 200, ""),
        (b"{" + b" " * (256 * 1024 - 1) + b"}", 400, "over the limit of 262144 bytes"),
        (b"", 200, ""),
        (b"\xff", 400, "Invalid body"),
        (b"[" * 100_000, 400, "Invalid body"),
        (b"{", 400, "Invalid body"),
    ],
    ids=["full", "too long", "empty", "no UTF-8", "deep", "half"],
)
async def test_a_secrets_body_is_bounded_json(app: RunningApp, body: bytes, status: int, words: str) -> None:
    reply = await app.client.post(SECRETS, content=body)
    assert reply.status_code == status
    assert words in reply.text


async def test_a_fault_before_the_handshake_is_answered_is_a_500_with_a_traceback(
    app: RunningApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr("asr_server.annexes.realtime.route.check_origin", fail)
    refusal = await refused(app.url)
    assert (refusal.status, refusal.error["type"]) == (500, "server_error")
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.getMessage() == "a realtime handshake has failed"
    assert line.exc_info


async def test_a_lazy_model_is_loaded_by_its_first_session() -> None:
    async with run_app(embedded(load="lazy")) as app, open_session(app.url):
        await until(lambda: app.dispatcher.ready)
