"""benchmarks/gpu.sh with every benchmark replaced by one that writes its result at once.

`make gpu-dry-run` runs the real ones on CPU. Here: that the script asks for what they know, and that all of
their results come back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
TESTS = {"cuda-tests.xml", "kernel-tests.xml"}  # for a GPU: the dry run leaves them to the suite
EXPECTED = {
    *("parity.json", "graphs-off.json", "profile.json"),
    *("turbo.json", "large.json", "kernels.json", "fp8.json", "workers.json", "lengths.json"),
    *("http-long.json", "http-clips.json", "peers.json"),
    *("replicas-2.json", "transport.json", "executors.json"),
}
# Writes what it is asked to, notes its arguments, and fails for flags that the benchmark does not have.
STAND_IN = f"""#!{sys.executable}
import os, pathlib, shlex, sys

def stand_in(*arguments):
    module = arguments[1] if arguments[:1] == ("-m",) else ""
    with open(os.environ["NOTED"], "a") as notes:
        print(*arguments, file=notes)
    if module.startswith("benchmarks.") and module != "benchmarks.gpu_summary":
        source = pathlib.Path("benchmarks", module.split(".")[1] + ".py").read_text()
        serve = arguments.index("--serve") + 1 if "--serve" in arguments else -1
        for number, each in enumerate(arguments):
            quoted = '"' + each.replace("--no-", "--") + '"'
            if each.startswith("--") and number != serve and quoted not in source:
                sys.exit(f"{{module}} does not know {{each}}")
    for flag in ("--json", "--junit-xml"):
        if flag in arguments and os.environ["FAILING"] not in arguments[arguments.index(flag) + 1]:
            pathlib.Path(arguments[arguments.index(flag) + 1]).write_text("")

if sys.argv[1:3] == ["-m", "benchmarks.dry_run"]:
    for line in pathlib.Path(sys.argv[3]).read_text().splitlines()[int(sys.argv[4]) :: 2]:
        stand_in("-m", *shlex.split(line))
else:
    stand_in(*sys.argv[1:])
"""


def run(tmp_path: Path, *arguments: str, failing: str = "none") -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "results"),
        "NOTED": str(tmp_path / "notes"),
        "FAILING": failing,
    }
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def brought_back(tmp_path: Path) -> set[str]:
    (archive,) = (tmp_path / "results").iterdir()
    with tarfile.open(archive) as files:
        return {Path(name).name for name in files.getnames()}


def test_every_result_and_the_log_come_back_in_one_archive(tmp_path: Path) -> None:
    ran = run(tmp_path, "--dry-run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert brought_back(tmp_path) >= EXPECTED | {"log.txt"}
    notes = (tmp_path / "notes").read_text()
    assert "--device cpu" in notes
    assert "--device cuda" not in notes


def test_a_result_that_is_missing_is_named(tmp_path: Path) -> None:
    ran = run(tmp_path, "--dry-run", failing="parity")
    assert ran.returncode == 1
    assert ran.stdout.endswith("no result of:\n./parity.json\n")
    assert brought_back(tmp_path) >= EXPECTED - {"parity.json"}


@pytest.mark.parametrize("part", ["check", "engine", "http", "systems"])
def test_the_seconds_of_each_call_add_up_to_less_than_ten_minutes(part: str, tmp_path: Path) -> None:
    """As on the GPU; no part begins what it has no time for, and here nothing takes any."""
    ran = run(tmp_path, part)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (part == "check") == (brought_back(tmp_path) >= TESTS)
    seconds = [
        int(line.split()[-2]) for line in ran.stdout.splitlines() if line.endswith(" s") and ", " in line
    ]
    assert seconds
    assert sum(seconds) <= 600, seconds
    assert "--device cuda" in (tmp_path / "notes").read_text()


def test_an_unknown_flag_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--dry-ran").returncode == 2
