"""benchmarks/gpu.sh with every benchmark replaced by one that writes its result at once.

`make gpu-dry-run` runs the real ones on CPU. Here: that the script asks for what they know, and that all of
their results come back.
"""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
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
import os, pathlib, sys

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
    for flag in ("--json", "--junit-xml"):
        if flag in arguments:
            pathlib.Path(arguments[arguments.index(flag) + 1]).write_text("")

stand_in(*sys.argv[1:])
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "results"),
        "NOTED": str(tmp_path / "notes"),
        "TMPDIR": str(tmp_path),
    }
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)


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
