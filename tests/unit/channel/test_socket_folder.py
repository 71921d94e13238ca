import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asr_server.channel.zeromq import SocketFolder, remove_abandoned_folders

OWNER = "from asr_server.channel.zeromq import *; print(SocketFolder().path, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder that it has made."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_what_a_killed_server_left_is_removed(owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, path = owner
    (path / "events").touch()
    before = len(os.listdir("/proc/self/fd"))
    remove_abandoned_folders()
    assert path.is_dir()  # its owner lives
    assert len(os.listdir("/proc/self/fd")) == before
    process.kill()
    process.wait()
    remove_abandoned_folders()
    assert not path.exists()


def test_ones_own_folders_stay_until_they_are_removed() -> None:
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o077 == 0
    remove_abandoned_folders()
    assert folder.path.is_dir()
    folder.remove()
    assert not folder.path.exists()


def test_a_folder_that_somebody_has_removed_is_no_error_at_the_end() -> None:
    folder = SocketFolder()
    folder.path.rmdir()
    before = len(os.listdir("/proc/self/fd"))
    folder.remove()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def nested(path: Path, depth: int) -> None:
    """Deeper than Python's functions may call each other. From inside, as no path is so long."""
    path.mkdir()
    folder = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("a", dir_fd=folder)
        inner = os.open("a", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)


@pytest.fixture
def nested_folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "asr-ipc-nested"
    nested(path, 2000)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


def test_nested_folders_stop_no_start_and_keep_no_file_handle(nested_folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    remove_abandoned_folders()
    assert len(os.listdir("/proc/self/fd")) == before
    assert nested_folder.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
def test_another_users_folder_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "asr-ipc-other"
    path.mkdir()
    os.chown(path, 65534, 65534)
    remove_abandoned_folders()
    assert path.is_dir()


def test_a_link_to_elsewhere_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "asr-ipc-x").symlink_to(elsewhere)
    remove_abandoned_folders()
    assert elsewhere.is_dir()
