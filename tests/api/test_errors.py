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


def test_who_may_come_back_is_told_when() -> None:
    assert response_to(errors.Overloaded("x", 7)).headers["retry-after"] == "7"
    assert response_to(errors.EngineUnavailable("x", 9)).headers["retry-after"] == "9"


def test_who_has_no_key_is_told_how_to_show_one() -> None:
    assert response_to(errors.InvalidApiKey("x")).headers["www-authenticate"] == "Bearer"
