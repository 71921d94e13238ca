"""The processes that the server starts import nothing from the folder that it runs in."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import pytest

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.ffmpeg_client import decode_processes
from asr_server.audio.recording import Recording
from asr_server.dispatch.executors import MultiprocessExecutor
from asr_server.replica import RankSpec, _start
from asr_server.transport.messages import Heartbeat
from tests.support.embedded import embedded
from tests.unit.audio.audio_files import make, voice
from tests.unit.test_process import landlock_version

pytestmark = pytest.mark.slow

TRAPS = ("http", "json", "random", "socket", "tempfile", "numpy", "msgspec", "ray")


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run in a folder whose Python files leave the yielded file when one of them is imported."""
    mark = tmp_path / "imported"
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    yield mark
    assert not mark.exists()


@pytest.mark.usefixtures("trap")
async def test_a_replica_imports_nothing_from_the_working_directory() -> None:
    replica = await MultiprocessExecutor(embedded()).launch(0)
    try:
        (event,) = await replica.receive()
        assert isinstance(event, Heartbeat)
    finally:
        await replica.close()


def test_the_ffmpeg_process_imports_nothing_from_the_working_directory(
    trap: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = make(tmp_path_factory.mktemp("audio"), "a.m4a", voice(24_000, 1, 1.0), 24_000)
    decode_processes.shutdown()
    recording = Recording(path, AudioLimits())
    try:
        assert recording.next_slice() is not None
    finally:
        recording.close()
        decode_processes.shutdown()


ATTEMPTS = """
import os, socket, sys
from asr_server.audio import ffmpeg_process
from asr_server.process import gain_no_privileges

def attempt(connection):
    port, folder = int(sys.argv[1]), sys.argv[2]
    abstract = socket.socket(socket.AF_UNIX)
    attempts = {
        "read another process": lambda: open(f"/proc/{os.getppid()}/mem", "rb"),
        "read its environment": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(1),
        "signal another process": lambda: os.kill(os.getppid(), 0),
        "read a file": lambda: open(f"{folder}/there"),
        "list a folder": lambda: os.listdir(folder),
        "write a file": lambda: open(f"{folder}/file", "wb"),
        "cut a file": lambda: os.truncate(f"{folder}/there", 0),
        "remove a file": lambda: os.unlink(f"{folder}/there"),
        "remove a folder": lambda: os.rmdir(f"{folder}/folder"),
        "make a folder": lambda: os.mkdir(f"{folder}/more"),
        "make a link": lambda: os.symlink("x", f"{folder}/link"),
        "make a pipe": lambda: os.mkfifo(f"{folder}/pipe"),
        "run a program": lambda: os.execv("/bin/true", ["true"]),
        "connect": lambda: socket.create_connection(("127.0.0.1", port)),
        "listen": lambda: socket.create_server(("127.0.0.1", 0)),
        "reach another's socket": lambda: abstract.connect(f"\\0asr-server-test-{port}"),
    }
    for name, call in attempts.items():
        try:
            call()
            connection.send(f"{name}\\n".encode())
        except PermissionError:
            pass
    connection.close()

ours, theirs = socket.socketpair()
ffmpeg_process.serve = attempt
gain_no_privileges()
if os.fork() == 0:
    ffmpeg_process._run_decode_process(theirs)
theirs.close()
while part := ours.recv(4096):
    print(part.decode(), end="")
"""


@pytest.mark.skipif(landlock_version() < 6, reason="needs Linux 6.12 with Landlock")
def test_a_decode_process_cannot_reach_other_processes_nor_files_nor_connect(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("whole")
    (tmp_path / "folder").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as other:
        port = str(listener.getsockname()[1])
        other.bind(f"\0asr-server-test-{port}")
        other.listen()
        succeeded = subprocess.check_output([sys.executable, "-c", ATTEMPTS, port, tmp_path], text=True)
    assert succeeded == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there"]
    assert (tmp_path / "there").read_text() == "whole"


@pytest.mark.usefixtures("trap")
def test_a_rank_imports_nothing_from_the_working_directory() -> None:
    settings, (link, theirs) = embedded(tensor_parallel_size=2, device="cpu"), Pipe()
    with open(os.memfd_create("ranks"), "rb") as store, link, theirs:
        process = _start(RankSpec(0, 1, settings, 1, store.fileno(), theirs.fileno()))
        try:
            assert link.recv_bytes() == bytes(4), "it joins"
        finally:
            process.kill()
            process.communicate()
