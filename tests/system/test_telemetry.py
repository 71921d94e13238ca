"""Logs: which request a line is for, in whichever process it is written, and lines as JSON."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from asr_server.core import ChunkId
from asr_server.telemetry import (
    JsonFormatter,
    TextFormatter,
    announce,
    configure_logging,
    current_request_id,
    new_handle_id,
    working_for,
)
from tests.conftest import Server
from tests.support.until import wait_until

DIGITS = Path(__file__).parents[1] / "data" / "digits.wav"


def record(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": message, "levelname": "INFO", "name": "asr_server.api", **more})


def failure() -> logging.LogRecord:
    try:
        raise ZeroDivisionError("of a test")
    except ZeroDivisionError as error:
        return record("failed", exc_info=(type(error), error, error.__traceback__))


def test_control_characters_of_a_message_are_escaped_and_stay_in_its_line() -> None:
    lines = TextFormatter("api").format(record("name\n2026 INFO forged \x1b[2J")).split("\n")
    assert len(lines) == 1
    assert lines[0].endswith(r"name\n2026 INFO forged \x1b[2J")
    assert len(TextFormatter("api").format(failure()).split("\n")) > 3  # a traceback keeps its lines


def test_a_malformed_body_costs_the_log_one_line(server: Server) -> None:
    headers = {"content-type": "multipart/form-data; boundary=boundary", "x-request-id": "malformed-1"}
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, content=b"--bX\r\n", headers=headers, timeout=60).status_code == 400
    wait_until(lambda: "malformed-1" in server.written())
    assert [line for line in server.written().splitlines() if "python_multipart" in line] == []


def test_a_requests_id_runs_from_the_door_through_the_replica_to_the_answer(server: Server) -> None:
    with DIGITS.open("rb") as file:
        reply = httpx.post(
            f"{server.url}/v1/audio/transcriptions",
            headers={"x-request-id": "trace-me/1"},
            files={"file": file},
            data={"model": "whisper-1"},
            timeout=60,
        )
    assert reply.headers["x-request-id"] == "trace-me/1"
    wanted = ("goes to replica 0", "tokens at temperature", "POST /v1/audio/transcriptions: 200 in ")

    def lines() -> list[str]:
        return [line for line in server.lines() if "trace-me/1]" in line]

    wait_until(lambda: all(any(part in line for line in lines()) for part in wanted))
    assert {line.split("[")[1].split(" trace")[0] for line in lines()} == {"api", "replica 0"}


def test_one_line_says_what_is_served_and_why(server: Server) -> None:
    (line,) = [line for line in server.lines() if ": serving whisper-digits, revision " in line]
    for part in ("device cpu (", "dtype ", "slots 48 (", "threads ", "replicas 1"):
        assert part in line
    assert line.count("(") == line.count(")") == 4


def test_probes_are_logged_for_debugging_only(server: Server) -> None:
    server.get("/health")
    assert all(" DEBUG " in line for line in server.lines() if "GET /health: 200" in line)


def test_no_log_has_the_key_of_a_live_session(server: Server) -> None:
    """Not even for debugging, as this server logs."""
    address = server.url.replace("http", "ws") + "/v1/realtime"
    with connect(address, additional_headers={"Authorization": "Bearer a-secret", "x-request-id": "live"}):
        pass
    wait_until(lambda: "live] asr_server.api.middleware: WebSocket" in server.written())
    assert "a-secret" not in server.written()


def test_an_id_that_two_requests_share_is_told_apart_and_shown_as_it_was_given() -> None:
    current_request_id.set("shared")
    one, other = new_handle_id(), new_handle_id()
    current_request_id.set("")
    assert one != other
    formatter = TextFormatter("replica 1")
    with working_for(ChunkId(one, 0)):
        assert "[replica 1 shared] asr_server.api: hello" in formatter.format(record("hello"))
    assert "[replica 1] asr_server.api: hello" in formatter.format(record("hello"))


def test_a_line_as_json_is_one_object_traceback_included() -> None:
    with working_for(ChunkId("mine#7", 0)):
        entry = json.loads(JsonFormatter("api").format(failure()))
    assert (entry["level"], entry["process"], entry["logger"]) == ("info", "api", "asr_server.api")
    assert (entry["message"], entry["request_id"]) == ("failed", "mine")
    assert "ZeroDivisionError: of a test" in entry["exception"]
    assert entry["time"].endswith("+00:00")
    assert "\n" not in JsonFormatter("api").format(failure())


def test_what_is_announced_is_a_line_for_scripts_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("info", "json")
        announce("listening")
        told = capsys.readouterr()
        assert (told.out, json.loads(told.err)["message"]) == ("", "listening")
        configure_logging("info", "text")
        announce("listening")
        assert capsys.readouterr() == ("listening\n", "")
    finally:
        root.handlers[:], root.level = before
        logging.captureWarnings(False)


def test_lines_of_a_replica_in_a_thread_carry_its_name() -> None:
    line = record("hello")
    line.threadName = "replica 3"
    assert "[replica 3] asr_server.api: hello" in TextFormatter("api").format(line)
    assert json.loads(JsonFormatter("api").format(line))["process"] == "replica 3"


@pytest.fixture
def logged_as_before() -> Iterator[None]:
    names = ("python_multipart", "httpx2", "")
    before = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    handlers = logging.root.handlers[:]
    yield
    logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    for logger, level in before:
        logger.setLevel(level)


@pytest.mark.usefixtures("logged_as_before")
def test_talkative_libraries_are_quiet_and_warnings_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", process="replica 7")
    logging.getLogger("python_multipart").warning("a bad body")
    logging.getLogger("httpx2").info("GET http://user:password@host")
    assert capsys.readouterr().err == ""
    logging.getLogger("python_multipart").error("broken")
    logging.getLogger("httpx2").warning("slow")
    logging.getLogger("other").debug("detail")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" [replica 7] ")[2] for line in lines[:3]] == [
        "python_multipart: broken",
        "httpx2: slow",
        "other: detail",
    ]
    assert "py.warnings: " in lines[3]


def test_a_trailing_line_break_is_no_part_of_a_line_and_figures_are_values_of_it_as_json() -> None:
    assert TextFormatter("api").format(record("hello\n")).endswith("INFO    [api] asr_server.api: hello")
    entry = json.loads(JsonFormatter("api").format(record("hello", figures={"chunks": 0})))
    assert entry["chunks"] == 0
    assert "exception" not in entry


def test_what_is_announced_is_read_at_once_by_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        announce("listening")
        assert os.read(reading, 100) == b"listening\n"
    os.close(reading)
