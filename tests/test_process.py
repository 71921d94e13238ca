"""What a process inherits and shows, tried with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COUNT_ARENAS = """
import ctypes, sys, threading
from asr_server.process import share_one_arena
share_one_arena()
libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
all_at_once = threading.Barrier(4)
def allocate():
    all_at_once.wait()
    libc.malloc(1000)
    all_at_once.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc")
@pytest.mark.parametrize(("given", "arenas"), [({}, 1), ({"MALLOC_ARENA_MAX": "3"}, 3)])
def test_threads_share_one_arena_unless_the_environment_says_otherwise(
    tmp_path: Path, given: dict[str, str], arenas: int
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | given
    told = tmp_path / "malloc_info.xml"
    subprocess.run([sys.executable, "-c", _COUNT_ARENAS, told], check=True, env=environment, timeout=60)
    assert told.read_text().count("<heap nr=") == arenas
