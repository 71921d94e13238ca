"""What a process and its children use, as the system says it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from asr_server.api import process_usage
from asr_server.api.process_usage import Usage, resident_bytes, usage_of

BUSY_CHILD = """
import subprocess, sys, time
end = time.process_time() + 0.3
while time.process_time() < end: pass
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, '-c', {BUSY_CHILD!r}])
child = subprocess.Popen([sys.executable, '-c', 'print(1, flush=True); input()'], stdin=subprocess.PIPE)
input()
child.communicate(b'go')
input()
"""


def known_usage_of(pid: int) -> Usage:
    usage = usage_of(pid)
    assert usage is not None
    return usage


def test_memory_is_that_of_the_system() -> None:
    usage = known_usage_of(os.getpid())
    assert usage.resident_bytes >= 0.5 * psutil.Process().memory_info().rss


def test_memory_of_this_process_is_its_resident_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / "statm"
    monkeypatch.setattr(process_usage, "STATM", pages)
    assert resident_bytes() == 0
    pages.write_text("9000 500 70 4 0 3000 0\n")
    assert resident_bytes() == 500 * os.sysconf("SC_PAGE_SIZE")


def test_children_count_with_what_those_that_have_ended_used() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        assert parent.stdout.readline() == "1\n"  # of the second child: the first has ended
        with_child = known_usage_of(parent.pid)
        assert with_child.num_processes == 2
        assert with_child.cpu_s >= 0.3
        parent.stdin.write("go\n")
        parent.stdin.flush()
        while (alone := known_usage_of(parent.pid)).num_processes == 2:
            time.sleep(0.01)
        assert alone.cpu_s >= with_child.cpu_s
        assert alone.resident_bytes < with_child.resident_bytes
        parent.communicate("go\n")


def test_a_process_that_has_ended_uses_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert usage_of(process.pid) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_process_that_hides_its_memory_can_be_read() -> None:
    hide = (
        "from asr_server.process import hide_from_other_processes as hide; hide(); print(1, flush=True);"
        " input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hide], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        assert known_usage_of(process.pid).resident_bytes > 1 << 20
        process.communicate("go\n")


def stat_of(cpu_ticks: int, childrens_ticks: int = 0, pages: int = 0) -> list[str]:
    """The fields behind a command's name in /proc/PID/stat."""
    fields = ["1000000"] * 50
    fields[11:15] = map(str, (cpu_ticks, 10 * cpu_ticks, childrens_ticks, 10 * childrens_ticks))
    fields[21] = str(pages)
    return fields


def test_ticks_and_pages_are_the_fields_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {1: stat_of(1, 3, 5), 2: stat_of(2, 0, 7)}
    monkeypatch.setattr(process_usage, "_stat", stats.__getitem__)
    monkeypatch.setattr(process_usage, "_children", lambda pid: iter([stats[2]]))
    ticks_per_s, page_bytes = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert usage_of(1) == Usage(2, 12 * page_bytes, (11 + 33 + 22) / ticks_per_s)


@pytest.mark.parametrize(("num_changes", "num_tries"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_process_whose_child_ends_meanwhile_is_read_again_a_few_times(
    num_changes: int, num_tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def stat(pid: int) -> list[str]:
        nonlocal reads
        reads += 1
        return stat_of(1, min(reads // 2, num_changes))

    monkeypatch.setattr(process_usage, "_stat", stat)
    monkeypatch.setattr(process_usage, "_children", lambda pid: iter(()))
    assert usage_of(1)
    assert reads == 2 * num_tries


def test_processes_that_have_ended_are_left_out() -> None:
    labels = {("m", "replica 0"): os.getpid(), ("m", "replica 1"): 1 << 30}
    assert set(process_usage.usage_of_each(labels)) == {("m", "replica 0")}
