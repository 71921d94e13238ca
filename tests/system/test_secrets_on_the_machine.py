"""Who shares the machine with a server learns none of its secrets: a real server, run as another user."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from asr_server.config import EMBEDDED_MODEL
from tests.conftest import Server, run_server
from tests.unit.audio.audio_files import make, voice

NOBODY = 65534
KEY = "a-key-of-more-than-20-letters"
INHERITED = {
    "PIP_INDEX_URL": "https://user:index-password@index.example/simple",
    "AWS_SESSION": "cloud-credential",
    "DATABASE_URL": "postgres://database-password@db",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="becomes another user"),
]

TRY = "import subprocess, sys, asr_server, msgspec; subprocess.run([sys.executable, '-V'], check=True)"
PACKAGES = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parents[2]), *(path for path in sys.path if path.endswith("site-packages"))]
    )
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a command that runs Python as the other user, who may not run the one in root's home."""
    command = tmp_path_factory.mktemp("bin") / "python"
    become = f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups"
    for path in (sys.executable, "/usr/bin/python3"):
        command.write_text(f'#!/bin/sh\nexec {become} {path} "$@"\n')
        command.chmod(0o755)
        if run(str(command), "-c", TRY).returncode == 0:
            return str(command)
    pytest.skip("the other user can run no Python that has the server's packages")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | PACKAGES
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[Server]:
    """Yield a server that belongs to another user, after its FFmpeg process has decoded a recording."""
    home = tmp_path_factory.mktemp("home")
    for folder in (home, *home.parents[:3]):
        folder.chmod(0o755)
    os.chown(home, NOBODY, NOBODY)
    recording = make(tmp_path_factory.mktemp("audio"), "a.m4a", voice(24_000, 1, 1.0), 24_000)
    folders = {"HOME": str(home), "TMPDIR": str(home)}
    arguments = (str(EMBEDDED_MODEL), "--api-key", KEY)
    environment = folders | INHERITED | PACKAGES
    with run_server(*arguments, python=python, **environment) as server:
        reply = httpx.post(
            f"{server.url}/v1/audio/transcriptions",
            headers={"authorization": f"Bearer {KEY}"},
            files={"file": recording.read_bytes()},
            data={"model": "whisper-digits"},
        )
        assert reply.status_code == 200, reply.text
        yield server


def test_the_key_is_not_on_the_command_line(server: Server) -> None:
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert KEY.encode() not in command
    assert b"\0--api-key\0" in command


def test_children_inherit_no_variable_that_they_do_not_need(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 2
    for child in children:
        assert not INHERITED.keys() & child.environ().keys()


_READ = """
import sys
for path in sys.argv[1:]:
    try:
        open(path, "rb").close()
    except OSError as error:
        print(path, type(error).__name__)
    else:
        print(path, "readable")
"""


def test_another_process_of_the_same_user_cannot_read_the_server(server: Server, python: str) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    decoders = [child.pid for child in children if "asr_server.audio.ffmpeg_process" in child.cmdline()]
    assert len(decoders) >= 2
    pids = (server.process.pid, *decoders)
    paths = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem")]
    printed = run(python, "-c", _READ, *paths).stdout
    assert printed.splitlines() == [f"{path} PermissionError" for path in paths]
