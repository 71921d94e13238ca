"""README and docs name only what exists, and README's commands do what it says, on a real server."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from asr_server import __version__
from asr_server.cli import main
from asr_server.cli.options import OTHER_NAMES, OTHER_SWITCHES, SWITCHES, in_our_spelling
from asr_server.server.settings import FIELDS, environment_names
from tests.conftest import Server

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
    *sorted((ROOT / "asr_server").glob("README.md")),
    *sorted((ROOT / "asr_server").glob("*/README.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
    ROOT / "examples" / "README.md",
]
LOCAL = "http://127.0.0.1:8000"
LIMIT_S = 100
FLAGS_OF_OTHER_PROGRAMS = {"--build-arg", "--disable-usage-stats", "--shape", "--systems"}


def prose_of(page: Path) -> str:
    """Without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def blocks_of(page: Path, language: str = "") -> list[str]:
    """Its blocks of code in this language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [code for name, code in blocks if name == language]


def anchors_of(page: Path) -> set[str]:
    """What a link can point to in it: its headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)]+)\)", prose_of(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if link.startswith("http"):
            continue
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            yield link


def test_the_changelog_has_the_version_that_the_program_says() -> None:
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def commands_of(page: Path) -> Iterator[list[str]]:
    """The calls of asr-server in its code, as the shell splits them."""
    code = [line for block in blocks_of(page) for line in block.replace("\\\n", " ").splitlines()]
    for span in [*code, *re.findall(r"`([^`\n]+)`", prose_of(page))]:
        if match := re.search(r"(?:^|[\s/])asr-server ((?:serve|transcribe|models|convert)\b.*)", span):
            yield shlex.split(match[1].partition(";")[0], comments=True)


def flags_of(command: click.Command) -> set[str]:
    own = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union({"--help", "-h"}, *map(flags_of, inner))


def unknown_flags(words: list[str]) -> set[str]:
    words = [words[0], *in_our_spelling(words[1:])]
    return {word for word in words if re.match(r"--?[a-z]", word)} - flags_of(main.commands[words[0]])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_flag_shown_is_one_of_the_command(page: Path) -> None:
    assert [(words, unknown) for words in commands_of(page) if (unknown := unknown_flags(words))] == []
    alone = set(re.findall(r"`(--[a-z-]+)", prose_of(page)))
    assert alone <= flags_of(main) | FLAGS_OF_OTHER_PROGRAMS | {*OTHER_NAMES, *OTHER_SWITCHES, *SWITCHES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_targets_and_benchmarks_are_there_by_the_names_shown(page: Path) -> None:
    text = page.read_text()
    settings = set(re.findall(r"ASR_SERVER_[A-Z_]*[A-Z]", text))
    assert settings <= {variable for name in FIELDS for variable in environment_names(name)}
    targets = set(re.findall(r"\bmake ([a-z-]+)(?=`|  |\n| [A-Z]+=)", text))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_readme_asks_with_curl_and_shows_the_answer(real_server: Server) -> None:
    asked, shown = next(
        re.findall(r"^\$ (curl.*)\n(.*)", block)[0] for block in blocks_of(README) if "$" in block
    )
    answer = subprocess.check_output(
        shlex.split(asked.replace(LOCAL, real_server.url)), cwd=ROOT, text=True, timeout=LIMIT_S
    )
    assert answer.startswith(shown.removesuffix(", ..."))
    assert json.loads(answer)["text"] == (ROOT / "examples" / "speech.txt").read_text().strip()


def test_readmes_python_prints_the_text(real_server: Server) -> None:
    (program,) = blocks_of(README, "python")
    printed = subprocess.check_output(
        [sys.executable, "-c", program.replace(LOCAL, real_server.url)], cwd=ROOT, text=True, timeout=LIMIT_S
    )
    assert printed == (ROOT / "examples" / "speech.txt").read_text()


def test_readmes_command_writes_subtitles_of_a_folder(server: Server, tmp_path: Path) -> None:
    here, elsewhere = [words for words in commands_of(README) if words[:2] == ["transcribe", "examples"]]
    assert "--url" in elsewhere
    words = [*elsewhere, *here[2:], "--output-dir", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "asr_server", *(word.replace(LOCAL, server.url) for word in words)],
        cwd=ROOT,
        env=dict(os.environ, ASR_SERVER_MODEL=""),
        timeout=LIMIT_S,
        check=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {"speech.srt", "speech.json"}
