"""Which kernels won is tried once on a machine: by replicas that start together, and by later ones."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_server.checkpoint.fetch import own_cache
from asr_server.model import WhisperSizes
from asr_server.model.kernels import TORCH, Kernels, candidates, remembered
from asr_server.model.kernels.candidates import choose_kernels
from asr_server.model.kernels.table import Choice, Forms

SIZES = WhisperSizes(100, 80, 64, 1, 2, 128, 1, 2, 128)


def kernel(*_: Any, **__: Any) -> Any: ...


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices on which kernels were tried: each trial ends otherwise than the one before."""
    devices: list[str] = []

    def try_on_gpu(kernels: Kernels, _: object) -> Choice:
        devices.append(torch.cuda.get_device_name())
        form = f" of {len(devices)} warps"
        return Choice(TORCH, f"trial {len(devices)}", {"flash_decode": form, "choose_token": None})

    monkeypatch.setattr(candidates, "_try_on_gpu", try_on_gpu)
    monkeypatch.setattr(candidates, "_all_kernels", lambda *_: Kernels(kernel, kernel, add_norm=kernel))
    on(monkeypatch, "NVIDIA H100")
    return devices


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)


def chosen(dtype: torch.dtype = torch.bfloat16) -> Choice:
    return choose_kernels("auto", SIZES, torch.device("cuda"), dtype)


def test_later_replicas_take_the_choice_of_the_first(tried: list[str]) -> None:
    assert chosen().report == "trial 1"
    second = chosen()
    assert second.report == "as before: trial 1"
    assert second.kernels.flash_decode.func is kernel  # type: ignore[union-attr]
    assert second.kernels.flash_decode.keywords == {"num_warps": 1}  # type: ignore[union-attr]
    assert second.kernels.choose_token is None
    assert second.kernels.add_norm is kernel, "as it was not tried"
    assert len(tried) == 1


def test_each_device_precision_and_form_of_the_kernels_is_tried(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen()
    chosen(torch.float16)
    on(monkeypatch, "NVIDIA H200")
    chosen()
    monkeypatch.setattr(remembered, "_sources", lambda: "def flash_decode(): ...")
    chosen()
    assert tried == ["NVIDIA H100", "NVIDIA H100", "NVIDIA H200", "NVIDIA H200"]


def choice(forms: Forms | None) -> Callable[[], Choice]:
    return lambda: Choice(TORCH, "tried", forms)


def recall(forms: Forms) -> Kernels:
    return TORCH


def test_replicas_that_start_together_try_once() -> None:
    is_trying, may_end, tried = threading.Event(), threading.Event(), list[str]()

    def start(name: str) -> None:
        def try_all() -> Choice:
            tried.append(name)
            is_trying.set()
            assert may_end.wait(60)
            return Choice(TORCH, name, {})

        remembered.remembered("a GPU", try_all, recall)

    replicas = [threading.Thread(target=start, args=(name,)) for name in ("first", "second")]
    replicas[0].start()
    assert is_trying.wait(60)
    replicas[1].start()
    may_end.set()
    for replica in replicas:
        replica.join(60)
    assert tried == ["first"]


def test_a_trial_in_which_a_kernel_failed_is_not_remembered() -> None:
    for _ in range(2):
        assert remembered.remembered("a GPU", choice(None), recall).report == "tried"


def test_a_file_that_was_cut_short_is_written_anew() -> None:
    remembered.remembered("a GPU", choice({}), recall)
    (path,) = (own_cache() / remembered.FOLDER).iterdir()
    path.write_bytes(path.read_bytes()[:10])
    reports = [remembered.remembered("a GPU", choice({}), recall).report for _ in range(2)]
    assert reports == ["tried", "as before: tried"]


def test_a_folder_that_cannot_be_written_to_hinders_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(remembered, "writable", lambda _: tmp_path / "file")
    assert remembered.remembered("a GPU", choice({}), recall).report == "tried"


def test_a_file_system_without_locks_keeps_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[FileIO] = []

    def fail(file: FileIO, _: int) -> None:
        files.append(file)
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    assert remembered.remembered("a GPU", choice({}), recall).report == "tried"
    assert [file.closed for file in files] == [True]
