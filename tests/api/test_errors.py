import pytest
from starlette.exceptions import HTTPException

from asr_server import errors
from asr_server.api.errors import body_of, response_to


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "param"),
    [
        (errors.InvalidAudio("x"), 400, "invalid_request_error", "invalid_audio", "file"),
        (errors.AudioTooShort("x"), 400, "invalid_request_error", "audio_too_short", "file"),
        (errors.AudioTooLong("x"), 400, "invalid_request_error", "audio_too_long", "file"),
        (errors.SampleRateTooHigh("x"), 400, "invalid_request_error", "sample_rate_too_high", "file"),
        (errors.TooManyChannels("x"), 400, "invalid_request_error", "too_many_channels", "file"),
        (errors.TooManyHeaders("x"), 431, "invalid_request_error", "too_many_headers", None),
        (errors.SpeakersUnavailable("x"), 503, "service_unavailable_error", "speakers_unavailable", None),
        (errors.UploadTooLarge("x"), 413, "invalid_request_error", "request_too_large", "file"),
        (errors.InvalidValue("x", "seed"), 400, "invalid_request_error", "invalid_value", "seed"),
        (errors.InvalidApiKey("x"), 401, "invalid_request_error", "invalid_api_key", None),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found", "model"),
        (errors.Overloaded("x", 7), 429, "rate_limit_error", "server_overloaded", None),
        (errors.EngineUnavailable("x", 9), 503, "service_unavailable_error", "engine_unavailable", None),
        (errors.ChunkFailed("secret"), 500, "server_error", None, None),
        (ValueError("secret"), 500, "server_error", None, None),
        (HTTPException(405), 405, "invalid_request_error", None, None),
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


def test_what_only_a_person_can_mend_is_not_to_be_tried_again() -> None:
    headers = response_to(errors.SpeakersUnavailable("x")).headers
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers


def test_a_recording_that_ended_the_engine_again_and_again_is_not_to_be_sent_again() -> None:
    response = response_to(errors.ReplicasEnded(3))
    assert (response.status_code, body_of(errors.ReplicasEnded(3)).error.code) == (500, "engine_crashed")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


def test_who_has_no_key_is_told_how_to_show_one() -> None:
    assert response_to(errors.InvalidApiKey("x")).headers["www-authenticate"] == "Bearer"
