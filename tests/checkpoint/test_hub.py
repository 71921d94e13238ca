"""The hub asked for real: one that cannot be reached, and one of our own that knows no model."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asr_server.config import EMBEDDED_MODEL

NOBODY = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs
CODE = """
import sys
from asr_server.checkpoint import CheckpointError, resolve_checkpoint
try:
    print(resolve_checkpoint(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


def resolve(name: str, endpoint: str, cache: Path) -> str:
    """What a fresh process says: the library reads its endpoint once. Standard error has to stay empty."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, name], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.strip()


class _NotFound(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def empty_hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_unreachable_hub_is_said_once_with_the_way_without_it(tmp_path: Path) -> None:
    message = resolve("large-v3", NOBODY, tmp_path)
    assert "\n" not in message
    assert message.startswith("the Hugging Face hub cannot be reached (")
    assert "run `asr-server models fetch large-v3` and copy the folder" in message


def test_without_a_hub_the_cache_serves(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--openai--whisper-tiny" / "snapshots" / ("0" * 40)
    (tmp_path / "models--openai--whisper-tiny" / "refs").mkdir(parents=True)
    (tmp_path / "models--openai--whisper-tiny" / "refs" / "main").write_text("0" * 40)
    shutil.copytree(EMBEDDED_MODEL, snapshot)
    assert resolve("tiny", NOBODY, tmp_path) == str(snapshot)


def test_a_model_that_the_hub_does_not_have_is_no_network_error(empty_hub: str, tmp_path: Path) -> None:
    message = resolve("nobody/nothing", empty_hub, tmp_path)
    assert message.startswith("the Hugging Face hub has no model nobody/nothing, or it is private")
