"""Open files, and threads in the background."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

import pytest

from asr_server import machine

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "limit"),
    [
        (1024, 4096, (4096, 4096), 4096),
        (1024, 1 << 20, (65_536, 1 << 20), 65_536),
        (1024, INFINITE, (65_536, INFINITE), 65_536),
        (65_536, 1 << 20, None, 65_536),
        (1 << 20, 1 << 20, None, 1 << 20),
        (INFINITE, INFINITE, None, 65_536),
        (4096, 4096, None, 4096),
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(
    soft: int, hard: int, raised: tuple[int, int] | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert machine.raise_open_files_limit() == limit
    assert given == ([raised] if raised else [])


def test_a_thread_in_the_background_gives_its_result_or_its_error() -> None:
    names = machine.in_daemon_thread(lambda: threading.current_thread(), "look-up").result(10)
    assert (names.name, names.daemon) == ("look-up", True)
    with pytest.raises(ZeroDivisionError):
        machine.in_daemon_thread(lambda: 1 // 0, "wrong").result(10)
    may_end = threading.Event()
    begun = machine.in_daemon_thread(may_end.wait, "begun")
    assert not begun.cancel()
    may_end.set()
    assert begun.result(10)


def test_all_threads_of_a_process_give_way() -> None:
    code = (
        "import os, threading; from asr_server import machine\n"
        "begun, ends = threading.Event(), threading.Event()\n"
        "def niceness(): return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
        "def run(): begun.set(); ends.wait(); seen.append(niceness())\n"
        "thread = threading.Thread(target=run); thread.start(); begun.wait()\n"
        "before, seen = niceness(), []; machine.lower_priority(2); ends.set(); thread.join()\n"
        "assert [niceness(), *seen] == [min(19, before + 2)] * 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
