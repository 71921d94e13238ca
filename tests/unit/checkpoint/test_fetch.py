"""Where fetched models lie, and who may hold the lock of a fetch."""

import fcntl
import os
from pathlib import Path

import pytest

from asr_server.annexes.model_sources import fetch as fetch_module
from asr_server.annexes.model_sources.fetch import fetch, fetched
from asr_server.annexes.model_sources.names import Published
from asr_server.checkpoint.files import hub_cache, own_cache, writable
from asr_server.errors import CheckpointError

MODEL = Published("small", "someone/small", 1000, revision="abc")
VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_caches_lie_where_huggingface_hub_has_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_cache() == home / ".cache/huggingface/hub"
    assert own_cache() == home / ".cache/huggingface/asr-server"
    monkeypatch.setenv("XDG_CACHE_HOME", "$HOME/xdg")
    assert own_cache() == home / "xdg/huggingface/asr-server"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert (own_cache(), hub_cache()) == (home / "hf/asr-server", home / "hf/hub")
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", "/old")
    assert hub_cache() == Path("/old")
    monkeypatch.setenv("HF_HUB_CACHE", "/new")
    assert hub_cache() == Path("/new")


def test_without_a_cache_the_process_has_its_own_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HF_HOME", str(home / "file"))
    folder = writable("readings")
    assert folder.is_dir()
    assert folder == writable("readings")
    assert not folder.is_relative_to(home)


def test_a_whole_model_goes_before_its_texts_and_none_is_taken_before_it_is_whole(home: Path) -> None:
    models = own_cache() / "models"
    for name in ("someone--small@old-texts", "someone--small@abc.partial", "someone--smaller@abc"):
        (models / name).mkdir(parents=True)
    assert fetched(MODEL) is None
    assert fetched(MODEL, with_weights=False) == models / "someone--small@old-texts"
    (models / "someone--small@abc").mkdir()
    assert fetched(MODEL) == fetched(MODEL, with_weights=False) == models / "someone--small@abc"


def hold_the_lock(home: Path) -> int:
    models = own_cache() / "models"
    models.mkdir(parents=True, exist_ok=True)
    handle = os.open(models / "someone--small.lock", os.O_CREAT | os.O_RDWR, 0o644)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_a_fetch_does_not_wait_for_ever(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = hold_the_lock(home)
    monkeypatch.setattr(fetch_module, "_OTHER_LIMIT_S", 0.3)
    with pytest.raises(CheckpointError, match=r"another process has been fetching small for .* minutes"):
        fetch(MODEL)
    os.close(handle)


def test_a_cache_without_room_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_module, "_fetch", no_space)
    with pytest.raises(
        CheckpointError, match=r"small cannot be kept in .*asr-server \(No space left on device\)"
    ):
        fetch(MODEL)


def test_the_lock_of_a_model_is_no_link_and_for_this_user_alone(home: Path) -> None:
    models = own_cache() / "models"
    (models / "someone--small@abc").mkdir(parents=True)
    assert fetch(MODEL) == models / "someone--small@abc"
    lock = models / "someone--small.lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.unlink()
    lock.symlink_to(home / "elsewhere")
    with pytest.raises(CheckpointError, match="small cannot be kept"):
        fetch(MODEL)
    assert not (home / "elsewhere").exists()
