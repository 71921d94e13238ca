"""benchmarks/gpu.sh with every benchmark replaced by one that writes its result at once.

`make gpu-dry-run` runs the real ones on CPU. Here: that the script asks for what they know, and that all of
their results come back.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
WHEELS = ROOT / "benchmarks" / "gpu_wheels.sh"
NOTHING = "no such argument"  # a wheel's name may have "none" in it
TESTS = {"cuda-tests.xml", "kernel-tests.xml"}  # for a GPU: the dry run leaves them to the suite
HEADLINE = {"turbo.json", "turbo-beam.json", "http-clips.json", "http-long.json", "http-long-beam.json"}
NOT_THERE = ("av", "httpx2", "openai", "ray", "wyoming")  # packages that are not carried to a bare machine
EXPECTED = {
    *("parity.json", "turbo.json", "turbo-beam.json"),
    *("http-clips.json", "http-long.json", "http-long-beam.json"),
    *("large.json", "workers.json", "graphs-off.json"),
    *("http-threads.json", "http-loads.json", "kernels.json", "batches.json", "lengths.json"),
    *("word-times.json", "replicas-2.json"),
}
# Writes what it is asked to, notes its arguments, and fails for flags that the benchmark does not have.
# Hundreds of them start: without packages, by -S, each does so in half the time.
STAND_IN = f"""#!{sys.executable} -IS
import os, pathlib, sys, time

SHARED = {{"--json": "benchmark_parser(__doc__", "--budget-s": "has_budget=True"}}

def stand_in(*arguments):
    module = arguments[1] if arguments[:1] == ("-m",) else ""
    with open(os.environ["NOTED"], "a") as notes:
        print(*arguments, file=notes)
    if module.startswith("benchmarks.") and module != "benchmarks.gpu_summary":
        source = pathlib.Path("benchmarks", module.split(".")[1] + ".py").read_text()
        for each in arguments:
            flag = each.partition("=")[0]
            wanted = SHARED.get(flag, '"' + flag.replace("--no-", "--") + '"')
            if each.startswith("--") and wanted not in source:
                sys.exit(f"{{module}} does not know {{each}}")
    if os.environ["HANGING"] in " ".join(arguments):
        time.sleep(100)
    if os.environ["CRASHING"] in " ".join(arguments):
        os.kill(os.getpid(), 11)
    if arguments[0] == "-c" and os.environ["FAILING"] == "pip":
        sys.exit("No module named 'fastapi'")
    if arguments[:2] == ("-m", "pip"):
        sys.exit("no matching distribution")
    for flag in ("--json", "--junit-xml"):
        if flag in arguments and os.environ["FAILING"] not in arguments[arguments.index(flag) + 1]:
            pathlib.Path(arguments[arguments.index(flag) + 1]).write_text("")

stand_in(*sys.argv[1:])
"""


def environment(
    tmp_path: Path, failing: str = NOTHING, hanging: str = NOTHING, crashing: str = NOTHING
) -> dict[str, str]:
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return os.environ | {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "results"),
        "NOTED": str(tmp_path / "notes"),
        "FAILING": failing,
        "HANGING": hanging,
        "CRASHING": crashing,
        "TMPDIR": str(tmp_path),
    }


def run(
    tmp_path: Path, *arguments: str, failing: str = NOTHING, crashing: str = NOTHING
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env=environment(tmp_path, failing, crashing=crashing),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def brought_back(tmp_path: Path) -> set[str]:
    (archive,) = (tmp_path / "results").glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return {Path(name).name for name in files.getnames()}


def test_every_result_and_the_log_come_back_in_one_archive(tmp_path: Path) -> None:
    ran = run(tmp_path, "--dry-run")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(list((tmp_path / "results").iterdir())) == 1
    assert brought_back(tmp_path) >= EXPECTED | {"log.txt"}
    notes = (tmp_path / "notes").read_text()
    assert "--device cpu" in notes
    assert "--device cuda" not in notes


def test_a_case_that_crashes_is_named_and_the_others_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "first", crashing="benchmarks.parity")
    assert ran.returncode == 1
    assert "\nparity.json: status 139 after" in ran.stdout
    assert ran.stdout.endswith("no result of:\n./parity.json\n")
    assert brought_back(tmp_path) >= {"turbo.json", "cuda-tests.xml", "kernel-tests.xml", "http-long.json"}


def test_without_what_is_to_travel_the_script_fails_at_once(tmp_path: Path) -> None:
    ran = run(tmp_path, "first", failing="pip")
    assert ran.returncode == 1
    assert ran.stdout.endswith("== failed: what .cache/gpu has cannot be installed\n")
    assert "benchmarks" not in (tmp_path / "notes").read_text()
    assert brought_back(tmp_path) >= {"log.txt"}


@pytest.mark.parametrize("part", ["first", "second", "sweeps", "systems"])
def test_the_seconds_of_each_call_add_up_to_less_than_ten_minutes(part: str, tmp_path: Path) -> None:
    """As on the GPU; no part begins what it has no time for, and here nothing takes any.

    The first call alone has every figure of the headline.
    """
    ran = run(tmp_path, part)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (part == "first") == (brought_back(tmp_path) >= TESTS)
    seconds = [
        int(line.split()[-2]) for line in ran.stdout.splitlines() if line.endswith(" s") and ", " in line
    ]
    assert seconds
    assert sum(seconds) <= 600, seconds
    notes = (tmp_path / "notes").read_text()
    assert "--device cuda" in notes
    if part == "first":
        assert brought_back(tmp_path) >= HEADLINE
        made, read = notes.index("-m benchmarks.uploads"), notes.index("-m benchmarks.serving")
        assert made < read, "the uploads are made once, before any server reads them"


def test_what_the_script_runs_needs_no_package_that_does_not_travel(tmp_path: Path) -> None:
    run(tmp_path, "first", "second", "sweeps", "systems")
    modules = sorted(set(re.findall(r"-m (benchmarks\.\w+)", (tmp_path / "notes").read_text())))
    assert "benchmarks.serving" in modules
    start = "import importlib, sys; sys.modules.update(dict.fromkeys(sys.argv[1].split()))"
    code = f"{start}; [importlib.import_module(name) for name in sys.argv[2:]]"
    command = [sys.executable, "-c", code, " ".join(NOT_THERE), *modules]
    imported = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert imported.returncode == 0, imported.stderr


def test_what_has_ended_comes_back_from_a_call_that_is_cut_off(tmp_path: Path) -> None:
    script = subprocess.Popen(
        [SCRIPT, "first"],
        env=environment(tmp_path, hanging="http-clips"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    notes = tmp_path / "notes"
    while script.poll() is None and not (notes.exists() and "http-clips" in notes.read_text()):
        time.sleep(0.05)
    for pid in (script.pid, *session_of(script.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    script.wait()
    assert brought_back(tmp_path) >= {"cuda-tests.xml", "parity.json", "log.txt"}
    (log,) = (tmp_path / "results").glob("*.log")
    assert "== http-clips.json, " in log.read_text(), "what the archive has not yet"


def session_of(leader: int) -> list[int]:
    """Processes that its session has beside it; `timeout` gives what it runs a group of its own."""
    return [each.pid for each in psutil.process_iter() if each.pid != leader and session(each.pid) == leader]


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_large_checkpoints_can_be_described_with_what_travels(tmp_path: Path) -> None:
    """Of openai-whisper a part travels, before which this environment's own must not be found."""
    without_pip, folder = tmp_path / "python", tmp_path / "gpu"
    write_python_without_pip(without_pip)
    named = {"PYTHON": str(without_pip), "NO_REAL_WEIGHTS": "1"}
    subprocess.run([WHEELS, "3.12", folder], env=os.environ | named, check=True)
    assert not any((folder / "wheels").iterdir())
    describe = (
        "import whisper\n"
        "from harness.checkpoints import SHAPES, _alignment_heads, _read_ranks, _special_names\n"
        "heads, names = _alignment_heads(SHAPES['large-v3']), _special_names(100)\n"
        "print(whisper.__file__, len(heads), len(names), len(_read_ranks()))"
    )
    described = subprocess.run(
        [sys.executable, "-c", describe],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{folder}/site:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert described.stdout == f"{folder}/site/whisper/__init__.py 10 108 50257\n", described.stderr


def write_python_without_pip(path: Path) -> None:
    path.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n')
    path.chmod(0o755)
