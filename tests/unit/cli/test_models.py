"""`asr-server models` and `asr-server convert` where nothing has to be fetched."""

import logging
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from asr_server.cli import main
from asr_server.config import EMBEDDED_MODEL


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nobody to fetch from."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def fields(line: str) -> list[str]:
    return re.split(" {2,}", line)


def test_each_model_is_a_line_with_its_names_size_languages_and_place(home: Path) -> None:
    fetched = home / "asr-server" / "models" / "openai--whisper-tiny@abc"
    fetched.mkdir(parents=True)
    for path in EMBEDDED_MODEL.iterdir():
        (fetched / path.name).symlink_to(path)
    (home / "asr-server" / "models" / "speakers@1").mkdir()
    done = call("models")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    rows = {row[0]: row[1:] for row in map(fields, lines[:-2])}
    assert rows["NAME"] == ["SIZE", "LANGUAGES", "HERE"]
    assert rows["tiny"] == ["153 MB", "99", str(fetched)]
    assert rows["tiny.en"] == ["78 MB", "English", "-"]
    assert rows["large-v2"] == ["6.2 GB", "99", "-"]
    assert rows["large-v3, large"] == ["3.1 GB", "100", "-"]
    assert rows["whisper-digits"] == ["2 MB", "English digits", "part of this server"]
    assert lines[-2] == ""
    assert lines[-1].endswith(f" Fetched into {home / 'asr-server'}.")
    second_columns = {line.index(row[1]) for line, row in zip(lines, map(fields, lines[:-2]), strict=False)}
    assert len(second_columns) == 1, "the columns stand below each other"


def test_what_is_fetched_is_a_line_each_and_failures_do_not_keep_others_back() -> None:
    done = call("models", "fetch", "base", str(EMBEDDED_MODEL), "tiny")
    assert done.exit_code == 2
    assert done.stdout == f"{EMBEDDED_MODEL}\n"
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert [line.split()[1] for line in errors] == ["base", "tiny"]
    assert call("models", "fetch", str(EMBEDDED_MODEL)).exit_code == 0
    assert call("models", "fetch").exit_code == 2


def test_a_fetch_says_what_it_does_and_a_list_only_lists() -> None:
    logging.root.setLevel(logging.WARNING)
    assert call("models", "fetch", "whisper-digits").stdout == f"{EMBEDDED_MODEL}\n"
    assert logging.root.level == logging.INFO
    assert call("models", "fetch", "--help").stdout.startswith("Usage: ")


@pytest.mark.parametrize("command", [("models", "fetch", "tiny"), ("transcribe", "a.wav", "--model", "tiny")])
def test_a_model_that_could_not_be_kept_is_not_fetched_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    done = call(*command)
    assert done.exit_code == 2
    line = "file/asr-server/models cannot be written, and what is fetched is lost at the end: set HF_HOME"
    (first, *more) = [text for text in done.stderr.splitlines() if line in text]
    assert (first.startswith("Warning: "), more) == (command[0] == "transcribe", [])
    if command[0] == "models":
        assert first.startswith("Error: tiny is not fetched: ")
        assert len(done.stderr.splitlines()) == 1
