import logging

import httpx
import pytest

from asr_server.config import Settings
from tests.api.house import House, open_house

PATHS_OF_V1 = ["/v1/models", "/v1/models/whisper-1", "/v1/audio/transcriptions", "/v1/audio/translations"]


def error_of(response: httpx.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_every_reply_has_a_request_id(house: House) -> None:
    replies = [
        await house.client.get("/health"),
        await house.client.get("/nowhere"),
        await house.client.get("/v1/audio/transcriptions"),
        await house.client.get("/v1/models/none"),
        await house.post(),
        await house.post(b"no audio"),
        await house.post(stream="true"),
    ]
    assert [reply.status_code for reply in replies] == [200, 404, 405, 404, 200, 400, 200]
    ids = {reply.headers["x-request-id"] for reply in replies}
    assert len(ids) == len(replies)


async def test_the_clients_own_request_id_is_kept(house: House) -> None:
    reply = await house.client.get("/health", headers={"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "<script>"])
async def test_a_request_id_that_is_not_sane_is_replaced(house: House, given: str) -> None:
    reply = await house.client.get("/health", headers={"x-request-id": given})
    assert reply.headers["x-request-id"].startswith("req_")


async def test_requests_with_the_same_id_do_not_meet(house: House) -> None:
    headers = {"x-request-id": "same"}
    house.client.headers.update(headers)
    assert all([await house.hears(), await house.hears()])


async def test_errors_of_the_framework_have_the_same_body(house: House) -> None:
    for reply in (await house.client.get("/nowhere"), await house.client.delete("/health")):
        assert error_of(reply)["type"] == "invalid_request_error"


async def test_a_bug_of_ours_shows_nothing_of_itself_and_is_logged_with_the_id(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    @house.app.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError("secret")

    with caplog.at_level(logging.ERROR):
        reply = await house.client.get("/bug", headers={"x-request-id": "find-me"})
    assert reply.status_code == 500
    assert error_of(reply)["type"] == "server_error"
    assert "secret" not in reply.text
    assert "find-me" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_key_is_asked_for_under_v1_and_not_at_the_probes() -> None:
    async with open_house(Settings(api_key="s3cret")) as house:
        for path in PATHS_OF_V1:
            reply = await house.client.request("POST" if "audio" in path else "GET", path)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"] == "Bearer"
            assert error_of(reply)["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/ping", "/version", "/load"):
            assert (await house.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "header", ["Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer \xe9"]
)
async def test_a_wrong_key_is_refused(header: str) -> None:
    async with open_house(Settings(api_key="s3cret")) as house:
        reply = await house.client.get("/v1/models", headers=[(b"authorization", header.encode("latin-1"))])
        assert reply.status_code == 401


async def test_the_right_key_opens() -> None:
    async with open_house(Settings(api_key="s3cret")) as house:
        house.client.headers["authorization"] = "Bearer s3cret"
        assert await house.hears()


async def test_no_engine_is_503_and_not_ready_but_alive() -> None:
    async with open_house() as house:
        house.dispatcher.links[0].ready = False
        for reply in (await house.post(), await house.client.get("/ready")):
            assert reply.status_code == 503
            assert reply.headers["retry-after"].isdecimal()
            assert error_of(reply)["type"] == "service_unavailable_error"
        assert (await house.client.get("/health")).status_code == 200


async def test_an_engine_given_up_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_house() as house:
        monkeypatch.setattr(type(house.dispatcher), "given_up", True)
        for path in ("/health", "/ping", "/ready"):
            assert (await house.client.get(path)).status_code == 503
        assert (await house.post()).status_code == 503


async def test_models_are_listed_under_every_name_they_answer_to() -> None:
    async with open_house(Settings(served_model_name="org/ears", model_alias="whisper-1,asr")) as house:
        listed = (await house.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["org/ears", "whisper-1", "asr"]
        assert (await house.client.get("/v1/models/org%2Fears")).json()["id"] == "org/ears"
        missing = await house.client.get("/v1/models/nobody")
        assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_origins_are_allowed_when_they_are_named() -> None:
    async with open_house(Settings(cors_origins="https://a.example")) as house:
        reply = await house.client.get("/nowhere", headers={"origin": "https://a.example"})
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-request-id" in reply.headers["access-control-expose-headers"]


async def test_the_description_of_the_api_names_the_form(house: House) -> None:
    paths = (await house.client.get("/openapi.json")).json()["paths"]
    form = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"][
        "schema"
    ]
    assert {"file", "model", "language", "response_format"} <= set(form["properties"])
    assert form["required"] == ["file", "model"]
