"""What a process inherits and shows, tried with real processes."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asr_server import process
from asr_server.config import flag_name
from asr_server.process import SECRET_FLAG, child_environment
from asr_server.server.settings import FIELDS

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
    script = "from asr_server.process import SECRET_FLAG, hide_value; hide_value(SECRET_FLAG); "
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
        (["--port=9000", "--api-key=s3cret", "a=b"], ["--port=9000", "--api-key=***", "a=b"]),
    ],
)
def test_the_value_of_a_flag_disappears_from_the_command_line(arguments: list[str], shown: list[str]) -> None:
    assert {flag_name(setting) for setting in FIELDS if setting.endswith("_key")} == {SECRET_FLAG}
    assert command_line_after_hiding(*arguments) == shown


OF_EVERY_CHILD = ("LD_LIBRARY_PATH", "LC_ALL", "TMPDIR", "PYTHONUNBUFFERED", "MALLOC_ARENA_MAX")
OF_ENGINES = (
    *("CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("TORCHINDUCTOR_CACHE_DIR", "HF_HOME", "CC"),
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


@pytest.mark.parametrize("inherited", ["", os.pathsep, f"{os.pathsep}/a"])
def test_no_empty_entry_of_the_path_is_passed_on(inherited: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", inherited)
    assert "" not in child_environment()["PYTHONPATH"].split(os.pathsep)


def test_a_checkout_is_found_by_its_children_and_an_installed_package_needs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/a{os.pathsep}/b")
    checkout = str(Path(process.__file__).parents[1])
    assert child_environment()["PYTHONPATH"] == os.pathsep.join([checkout, "/a", "/b"])
    assert child_environment()["PYTHONSAFEPATH"] == "1"
    for folder in ("site-packages", "dist-packages"):
        monkeypatch.setattr(process, "_PACKAGE_PARENT", Path("/usr/lib") / folder)
        assert child_environment()["PYTHONPATH"] == os.pathsep.join(["/a", "/b"])


# -- What a process gives up ---------------------------------------------------------------------------------

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")


def output_of(code: str, *arguments: str | Path) -> str:
    script = f"import ctypes, os, signal, socket, sys\nfrom asr_server.process import *\n{code}"
    return subprocess.check_output(
        [sys.executable, "-c", script, *map(str, arguments)], text=True, timeout=60
    )


@on_linux
def test_a_process_is_bound_to_its_parent_without_privileges_and_unreadable() -> None:
    code = """
def state():
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
    libc, death = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(2, ctypes.byref(death), 0, 0, 0)
    ignored = [number for number in (2, 15) if signal.getsignal(number) is signal.SIG_IGN]
    print(int(status["NoNewPrivs"]), libc.prctl(3, 0, 0, 0, 0), death.value, ignored)
state()
gain_no_privileges(); state()
hide_from_other_processes(); state()
be_killed_with_the_parent(); state()
leave_stopping_to_the_parent(); state()
"""
    told = output_of(code).splitlines()[-5:]
    assert told == ["0 1 0 []", "1 1 0 []", "1 0 0 []", "1 0 9 []", "1 0 9 [2, 15]"]


@pytest.mark.parametrize("last", [b"", b"x"])
def test_a_child_ends_when_its_parent_has_closed_its_input(last: bytes) -> None:
    script = (
        "from asr_server.process import *; end_with_the_parent(); print(flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        assert child.poll() is None
        child.communicate(last, timeout=60)
        assert child.returncode == 1


def test_a_child_that_has_done_its_work_need_not_wait_for_its_parent() -> None:
    script = "from asr_server.process import *; end_with_the_parent()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1) as child:
        assert child.wait(60) == 0


def landlock_version() -> int:
    return int(ctypes.CDLL(None).syscall(444, None, 0, 1)) if sys.platform == "linux" else -1


@pytest.mark.skipif(landlock_version() < 1, reason="needs Landlock")
def test_a_process_that_may_gain_privileges_cannot_be_confined() -> None:
    code = "try: confine()\nexcept OSError as error: print(error.errno, error.strerror)"
    assert output_of(code) == f"{errno.EPERM} Landlock refuses to confine this process\n"
