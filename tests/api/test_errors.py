import random

import pytest
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from asr_server import errors
from asr_server.api.errors import body_of, install, reply_to, response_to


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "param"),
    [
        (errors.InvalidAudio("x"), 400, "invalid_request_error", "invalid_audio", "file"),
        (errors.AudioTooShort("x"), 400, "invalid_request_error", "audio_too_short", "file"),
        (errors.AudioTooLong("x"), 400, "invalid_request_error", "audio_too_long", "file"),
        (errors.SampleRateTooHigh("x"), 400, "invalid_request_error", "sample_rate_too_high", "file"),
        (errors.TooManyChannels("x"), 400, "invalid_request_error", "too_many_channels", "file"),
        (errors.TooManyHeaders("x"), 431, "invalid_request_error", "too_many_headers", None),
        (errors.UploadTooLarge("x"), 413, "invalid_request_error", "request_too_large", "file"),
        (errors.InvalidValue("x", "seed"), 400, "invalid_request_error", "invalid_value", "seed"),
        (errors.InvalidApiKey("x"), 401, "invalid_request_error", "invalid_api_key", None),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found", "model"),
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


@pytest.mark.parametrize("error", [errors.Overloaded("x", 8), errors.EngineUnavailable("x", 8)])
def test_who_may_come_back_is_told_when_and_not_all_the_same(error: Exception) -> None:
    headers = [response_to(error).headers for _ in range(100)]
    assert {header["retry-after"] for header in headers} <= {"8", "9", "10"}
    waits_ms = {int(header["retry-after-ms"]) for header in headers}
    assert len(waits_ms) > 50
    assert 8000 <= min(waits_ms) <= max(waits_ms) <= 10_000


def test_retry_after_is_a_second_at_least_and_no_more_than_official_clients_obey() -> None:
    headers = [response_to(errors.Overloaded("x", wait_s)).headers for wait_s in (0.0, 1e6)]
    assert [1 <= int(header["retry-after"]) <= 2 for header in headers] == [True, False]
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


@pytest.mark.parametrize(
    ("wait_s", "shortest", "longest"),
    [
        (0.0, ("1", "1000"), ("2", "1250")),
        (8.0, ("8", "8000"), ("10", "10000")),
        (48.0, ("48", "48000"), ("60", "60000")),
        (1e6, ("48", "48000"), ("60", "60000")),
    ],
)
def test_a_wait_is_spread_by_a_quarter(
    wait_s: float, shortest: tuple[str, str], longest: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {min: shortest, max: longest}
    for end, expected in ends.items():
        monkeypatch.setattr(random, "uniform", lambda least, most, end=end: end(least, most))
        headers = response_to(errors.Overloaded("x", wait_s)).headers
        assert (headers["retry-after"], headers["retry-after-ms"]) == expected


def test_a_client_of_a_server_that_stops_finds_another_by_a_new_connection() -> None:
    headers = response_to(errors.ShuttingDown()).headers
    assert headers["connection"] == "close"
    assert headers["retry-after"]
    assert "connection" not in response_to(errors.EngineUnavailable("x")).headers


def test_headers_of_an_http_error_are_kept() -> None:
    assert response_to(HTTPException(426, "x", {"Upgrade": "websocket"})).headers["upgrade"] == "websocket"
    assert "retry-after" not in response_to(HTTPException(500)).headers


def test_a_client_that_has_left_is_499_in_the_log_and_gets_nothing() -> None:
    reply = reply_to(ClientDisconnect())
    assert (reply.status_code, reply.body) == (499, b"")
    assert reply_to(errors.InvalidValue("x")).status_code == 400


def test_the_first_field_that_is_wrong_is_named_by_its_last_part() -> None:
    wrong = [
        {"loc": ("query", "page", "size"), "msg": "too large"},
        {"loc": ("query", "other"), "msg": "missing"},
    ]
    error = RequestValidationError(wrong)
    detail = body_of(error).error
    assert (response_to(error).status_code, detail.param) == (400, "size")
    assert (detail.message, detail.code) == ("Invalid request: too large.", "invalid_value")


def test_an_app_answers_each_kind_of_error_by_itself() -> None:
    app = FastAPI()
    install(app)
    kinds = (errors.ReportedError, RequestValidationError, HTTPException, ClientDisconnect)
    handlers = {app.exception_handlers[kind] for kind in kinds}
    assert [handler.__module__ for handler in handlers] == ["asr_server.api.errors"]
