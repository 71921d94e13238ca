import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from asr_server import errors
from asr_server.api.errors import body_of, response_to


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "param"),
    [
        (errors.InvalidAudio("x"), 400, "invalid_request_error", "invalid_audio", "file"),
        (errors.InvalidValue("x", "seed"), 400, "invalid_request_error", "invalid_value", "seed"),
        (errors.Overloaded("x", 7), 429, "rate_limit_error", "server_overloaded", None),
        (errors.EngineUnavailable("x", 9), 503, "service_unavailable_error", "engine_unavailable", None),
        (errors.ChunkFailed("secret"), 500, "server_error", None, None),
        (ValueError("secret"), 500, "server_error", None, None),
        (HTTPException(405), 405, "invalid_request_error", None, None),
        (HTTPException(499), 499, "invalid_request_error", None, None),
        (HTTPException(500), 500, "server_error", None, None),
    ],
)
def test_each_error_has_its_status_and_body(
    error: Exception, status: int, type: str, code: str | None, param: str | None
) -> None:
    response = response_to(error)
    detail = body_of(error).error
    assert (response.status_code, detail.type, detail.code, detail.param) == (status, type, code, param)
    assert all(f'"{key}":'.encode() in response.body for key in ("error", "message", "type", "param", "code"))
    assert b"secret" not in response.body


def test_retry_after_is_a_second_at_least_and_no_more_than_official_clients_obey() -> None:
    headers = [response_to(errors.Overloaded("x", wait_s)).headers for wait_s in (0.0, 1e6)]
    assert 1 <= int(headers[0]["retry-after"]) <= 2
    assert 1000 <= int(headers[0]["retry-after-ms"]) <= 1250
    assert 48 <= int(headers[1]["retry-after"]) <= 60
    assert 48_000 <= int(headers[1]["retry-after-ms"]) <= 60_000


def test_a_recording_that_ended_the_engine_again_and_again_is_not_to_be_sent_again() -> None:
    response = response_to(errors.ReplicasEnded(3))
    assert (response.status_code, body_of(errors.ReplicasEnded(3)).error.code) == (500, "engine_crashed")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


def test_who_has_no_key_is_told_how_to_show_one() -> None:
    assert response_to(errors.InvalidApiKey("x")).headers["www-authenticate"] == "Bearer"


def test_a_client_of_a_server_that_stops_finds_another_by_a_new_connection() -> None:
    headers = response_to(errors.ShuttingDown()).headers
    assert headers["connection"] == "close"
    assert headers["retry-after"]
    assert "connection" not in response_to(errors.EngineUnavailable("x")).headers


def test_a_client_that_has_left_is_499_in_the_log_and_gets_nothing() -> None:
    reply = response_to(ClientDisconnect())
    assert (reply.status_code, reply.body) == (499, b"")
    assert response_to(errors.InvalidValue("x")).status_code == 400


def test_the_first_field_that_is_wrong_is_named_by_its_last_part() -> None:
    wrong = [
        {"loc": ("query", "page", "size"), "msg": "too large"},
        {"loc": ("query", "other"), "msg": "missing"},
    ]
    error = RequestValidationError(wrong)
    detail = body_of(error).error
    assert (response_to(error).status_code, detail.param) == (400, "size")
    assert (detail.message, detail.code) == ("Invalid request: too large.", "invalid_value")
