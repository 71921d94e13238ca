"""What a process and its children use, as the system says it."""

import subprocess
import sys
import time

import pytest

from asr_server.annexes.monitoring.metrics import Usage, usage_of

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
