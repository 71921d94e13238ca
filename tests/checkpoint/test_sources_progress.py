"""What a download shows of itself, and which of a repository's files it takes."""

from __future__ import annotations

import hashlib
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from asr_server.checkpoint.names import Published
from asr_server.checkpoint.sources import DownloadProgress, download_from_hub, has_sum
from tests.checkpoint.fake_hub import COMMIT, running_hub

MODEL = Published("mine", "someone/mine", 0)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_without_a_terminal_progress_is_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    caplog.set_level(logging.INFO, "asr_server")
    with DownloadProgress("tiny from the hub", 12_400_000) as progress:
        assert logged(caplog) == ["fetching tiny from the hub, 12 MB"]
        for clock[0], line in ((109.9, None), (110.0, 2), (119.9, None), (120.0, 4)):
            progress.add(1_000_000)
            assert logged(caplog) == ([f"tiny from the hub: {line} MB of 12 MB"] if line else [])
        clock[0] = 200.0
        progress.add(-3_000_000)
        assert logged(caplog) == ["tiny from the hub: 1 MB of 12 MB"]
    with DownloadProgress("small files", 0):
        assert logged(caplog) == ["fetching small files"]


@pytest.mark.parametrize(("disabled", "has_bar"), [("", True), ("1", False)])
def test_on_a_terminal_progress_is_a_bar_unless_bars_are_unwanted(
    disabled: str,
    has_bar: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", disabled)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    caplog.set_level(logging.INFO, "asr_server")
    with DownloadProgress("tiny from the hub", 12_000_000) as progress:
        progress.add(6_000_000)
    captured = capsys.readouterr()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.err)
    assert bool(re.search(r"tiny from the hub [━╸╺]+ 6\.0/12\.0 MB", shown)) == has_bar
    assert logged(caplog) == ([] if has_bar else ["fetching tiny from the hub, 12 MB"])
    assert captured.out == ""


def test_a_sum_is_sha256_or_gits_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    assert has_sum(path, "ce013625030ba8dba906f756967f9e9ca394464a")  # as `git hash-object` prints it
    assert has_sum(path, hashlib.sha256(b"hello\n").hexdigest())
    assert not has_sum(path, "0" * 40)
    assert not has_sum(path, "0" * 64)


SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        ({SINGLE, INDEX, "pytorch_model.bin", "model.bin", *SHARDS}, {SINGLE}),
        ({INDEX, "pytorch_model.bin", "model.bin", *SHARDS}, {INDEX, *SHARDS}),
        ({"pytorch_model.bin", "model.bin", "flax_model.msgpack"}, {"pytorch_model.bin"}),
        ({"model.bin"}, {"model.bin"}),
    ],
)
def test_of_several_formats_the_first_is_taken_with_the_small_files(
    tmp_path: Path, files: set[str], taken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, folder, texts = (tmp_path / name for name in ("repository", "folder", "texts"))
    for path in (repository, folder, texts):
        path.mkdir()
    small = {"config.json", "tokenizer.json", "merges.txt", "vocabulary.txt"}
    for name in files | small | {"README.md", "model.onnx"}:
        (repository / name).write_text(name)
    with running_hub(repository) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert download_from_hub(MODEL, folder, with_weights=True) == COMMIT
        download_from_hub(MODEL, texts, with_weights=False)
    assert {path.name for path in folder.iterdir()} == small | taken
    assert {path.name for path in texts.iterdir()} == small


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_progress_begins_with_what_is_there_and_ends_with_the_whole(
    tmp_path: Path, ignores_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, folder = tmp_path / "repository", tmp_path / "folder"
    repository.mkdir()
    folder.mkdir()
    weights = b"weights of a model"
    (repository / SINGLE).write_bytes(weights)
    (repository / "config.json").write_text("{}")
    (folder / "config.json").write_text("{}")  # whole
    digest = hashlib.sha256(weights).hexdigest()
    (folder / f"{SINGLE}.{digest[:12]}.part").write_bytes(weights[:7])
    reached: list[int] = []
    monkeypatch.setattr(DownloadProgress, "reached", lambda progress, count: reached.append(count))
    monkeypatch.setattr(
        DownloadProgress, "add", lambda progress, count: reached.append(sum(reached[-1:]) + count)
    )
    with running_hub(repository) as hub:
        hub.ignores_ranges = ignores_ranges
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        download_from_hub(MODEL, folder, with_weights=True)
    again = [2] if ignores_ranges else []
    assert reached == [2, 9, *again, 2 + len(weights)]
    assert (folder / SINGLE).read_bytes() == weights


def test_nothing_of_http_is_loaded_before_a_download() -> None:
    code = (
        "import sys; from asr_server.checkpoint import sources, wheels\n"
        "assert not {'httpx2', 'huggingface_hub', 'rich'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
