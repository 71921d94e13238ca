"""The health check of a container asks where the server really listens, however it was told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from asr_server.cli.serve import health_url
from tests.conftest import Server


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


def test_the_check_passes_for_a_server_that_answers_and_fails_for_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = server.url.rpartition(":")[2]
    wait = "import sys; sys.stdin.read()"

    def check(port: str) -> subprocess.CompletedProcess[str]:
        """Of a process with the command line of a server on this port."""
        with subprocess.Popen([sys.executable, "-c", wait, "serve", "--port", port], stdin=-1) as process:
            return subprocess.run(
                [sys.executable, "-m", "asr_server", "health", "--pid", str(process.pid)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

    assert check(port).returncode == 0
    failed = check("1")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "http://127.0.0.1:1/health" in failed.stderr
