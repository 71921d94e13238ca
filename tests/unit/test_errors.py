"""What a client can tell from an error: its status, code and field, and when to come back."""

import pytest

from asr_server import errors
from asr_server.errors import (
    InvalidValue,
    Overloaded,
    ReportedError,
    RequestError,
    ServiceUnavailable,
    ShuttingDown,
)

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ReportedError)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_status_says_whose_fault_it_is(kind: type[ReportedError]) -> None:
    if issubclass(kind, RequestError):
        assert 400 <= kind.status < 500
    else:
        assert kind.status == (503 if issubclass(kind, ServiceUnavailable) else 500)


def test_what_repeats_the_clients_words_is_cut() -> None:
    error = InvalidValue("m" * 2001, "p" * 201)
    assert error.message == str(error) == "m" * 2000
    assert error.param == "p" * 200


def test_a_client_is_told_when_to_come_back() -> None:
    assert Overloaded("full", 2.5).retry_after_s == 2.5
    assert ServiceUnavailable("later").retry_after_s == 5.0
    assert ServiceUnavailable("later", 30.0).retry_after_s == 30.0
    assert (ShuttingDown().retry_after_s, ShuttingDown().message) == (5.0, "The server is shutting down.")
