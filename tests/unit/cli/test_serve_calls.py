"""`asr-server serve` up to the server, and `asr-server health` at one that answers as it is told."""

from __future__ import annotations

import http.server
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from asr_server.cli import main
from asr_server.cli.serve import health_url
from asr_server.errors import CheckpointError
from asr_server.server.settings import ServerSettings


class Server:
    """Takes what `serve` would run, and gives it `status`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = 0
        self.error: Exception | None = None
        self.models: list[ServerSettings] = []
        self.on_term: object = None
        monkeypatch.setattr("asr_server.server.run.run", self._run)

    def _run(self, models: list[ServerSettings]) -> int:
        self.models, self.on_term = models, signal.getsignal(signal.SIGTERM)
        if self.error:
            raise self.error
        return self.status

    def serve(self, *arguments: str) -> Result:
        before = signal.getsignal(signal.SIGTERM)
        try:
            return CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


@pytest.mark.parametrize("status", [0, 1, 3])
def test_the_status_is_that_of_the_server(serving: Server, status: int) -> None:
    serving.status = status
    assert serving.serve("whisper-digits", "--beam-size", "2").exit_code == status
    (settings,) = serving.models
    assert (settings.model_names[0], settings.beam_size) == ("whisper-digits", 2)


def test_a_model_that_cannot_be_read_is_a_line_and_status_2(serving: Server) -> None:
    serving.error = CheckpointError("its weights are damaged")
    done = serving.serve()
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "Error: its weights are damaged")


# -- The check of a container --------------------------------------------------------------------------------


class Answering(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as answering:
        thread = threading.Thread(target=answering.serve_forever, args=(0.01,))
        thread.start()
        yield answering.server_port
        answering.shutdown()
        thread.join()


@pytest.mark.parametrize("is_there", [True, False])
def test_the_check_asks_the_server_whose_flags_another_process_has(
    port: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = port if is_there else 9
    wait = "import sys; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", wait, "asr-server", "serve", "--port", str(port)]
    with subprocess.Popen(words, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()  # its command line is there from when it runs
        done = CliRunner().invoke(main, ["health", "--pid", str(process.pid)])
    assert done.exit_code == (0 if is_there else 1)
    assert done.stderr.startswith("" if is_there else f"Error: http://127.0.0.1:{port}/health: ")


def test_without_such_a_process_the_environment_says_where_the_server_listens(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASR_SERVER_PORT", str(port))
    assert CliRunner().invoke(main, ["health", "--pid", "99999999"]).exit_code == 0
    help_text = " ".join(CliRunner().invoke(main, ["health", "--help"]).output.split())
    assert "[default: 1]" in help_text


@pytest.mark.parametrize(
    ("arguments", "environment", "url"),
    [
        ([], {}, "http://127.0.0.1:8000/health"),
        (["openai/whisper-tiny", "--port", "9000"], {}, "http://127.0.0.1:9000/health"),
        (["--port=9000"], {"ASR_SERVER_PORT": "7000"}, "http://127.0.0.1:9000/health"),
        ([], {"ASR_SERVER_PORT": "7000", "ASR_SERVER_HOST": "0.0.0.0"}, "http://127.0.0.1:7000/health"),
        (["--host", "::", "--ssl-certfile", "a.pem"], {}, "https://[::1]:8000/health"),
    ],
)
def test_flags_and_environment_say_where_the_server_listens(
    arguments: list[str], environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert health_url(arguments) == url
