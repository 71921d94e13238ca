"""What a process inherits and shows, tried with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asr_server.config import FIELDS, flag_name
from asr_server.process import SECRET_FLAGS, child_environment

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


def command_line_after_hiding(*arguments: str) -> list[str]:
    script = "from asr_server.process import hide_keys; hide_keys(); "
    script += "import sys; sys.stdout.buffer.write(open('/proc/self/cmdline', 'rb').read())"
    command = [sys.executable, "-c", script, *arguments]
    words = subprocess.check_output(command, timeout=60, text=True).rstrip("\0").split("\0")
    return words[3:]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lets a process write its command line")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["serve", "--api-key", "s3cret", "--port", "9"], ["serve", "--api-key", "***", "--port", "9"]),
        (["serve", "--api-key=s3cret", "tiny"], ["serve", "--api-key=***", "tiny"]),
        (["--api-key", "k", "--api-key=last"], ["--api-key", "*", "--api-key=***"]),
        (["--api-key"], ["--api-key"]),
        (["--admin-key", "s3cret", "--port", "9"], ["--admin-key", "***", "--port", "9"]),
        (["--api-key", "one", "--admin-key=two1"], ["--api-key", "***", "--admin-key=***"]),
        (["--api-key-file", "keys", "--api-key=", "ü"], ["--api-key-file", "keys", "--api-key=", "ü"]),
    ],
)
def test_the_value_of_a_flag_disappears_from_the_command_line(arguments: list[str], shown: list[str]) -> None:
    assert {flag_name(setting) for setting in FIELDS if setting.endswith("_key")} == {*SECRET_FLAGS}
    assert command_line_after_hiding(*arguments) == shown


OF_EVERY_CHILD = ("LD_LIBRARY_PATH", "LC_ALL", "TMPDIR", "PYTHONUNBUFFERED", "MALLOC_ARENA_MAX")
OF_ENGINES = (
    "CUDA_HOME",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",
    "HF_HOME",
    "CC",
)
OF_NO_CHILD = ("AWS_SESSION", "UV_INDEX_URL", "HF_TOKEN", "NVIDIA_API_KEY", "VLLM_API_KEY", "NOTIFY_SOCKET")


def test_children_inherit_what_their_libraries_need_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OF_EVERY_CHILD, *OF_ENGINES, *OF_NO_CHILD):
        monkeypatch.setenv(name, "given")
    replica, decoder = child_environment(), child_environment(computes=False)
    assert [name for name in (*OF_EVERY_CHILD, *OF_ENGINES) if replica.get(name) != "given"] == []
    assert [name for name in OF_EVERY_CHILD if decoder.get(name) != "given"] == []
    assert not {*OF_NO_CHILD} & replica.keys()
    assert not {*OF_NO_CHILD, *OF_ENGINES} & decoder.keys()
