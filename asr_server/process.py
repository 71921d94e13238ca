"""What a server's process inherits, which signals it takes, and what ends it. Imports none of ours."""

import ctypes
import os
import re
import signal
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Final

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # glibc's malloc.h
_SET_PARENT_DEATH_SIGNAL: Final = 1  # prctl's PR_SET_PDEATHSIG
_SET_DUMPABLE: Final = 4  # prctl's PR_SET_DUMPABLE
_SET_NO_NEW_PRIVILEGES: Final = 38  # prctl's PR_SET_NO_NEW_PRIVS
_ARGUMENTS: Final = slice(45, 47)  # where they begin and end in memory: fields of /proc/self/stat
_HIDDEN: Final = b"***"
SECRET_FLAG: Final = "--api-key"
# Landlock's system calls, which have these numbers on every processor, and what they take away (landlock.h).
_CREATE_RULESET: Final = 444
_RESTRICT_SELF: Final = 446
_FILES: Final = 0b1_1111_1111_1111  # every right to files of its first version
_TRUNCATE: Final = 1 << 14
_TCP: Final = 0b11  # bind, connect
_OUTSIDE: Final = 0b11  # abstract sockets of other processes, signals to them
_TRUNCATE_SINCE, _TCP_SINCE, _OUTSIDE_SINCE = 3, 4, 6  # versions
_CAPABILITIES_VERSION: Final = 0x20080522  # capability.h
_VERSION: Final = 1  # the flag that asks for it
_PACKAGE_PARENT: Final = Path(__file__).resolve().parents[1]

# What children inherit of the environment. All else is the operator's, and may be secret.
_OF_THE_SYSTEM: Final = re.compile(
    r"PATH|HOME|USER|USERNAME|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LOCALE_ARCHIVE"
    r"|VIRTUAL_ENV|CONDA_PREFIX|GLIBC_TUNABLES|(LC|XDG|LD|DYLD|NIX_LD|MALLOC)_\w*|PYTHON\w*"
)
_OF_THE_ENGINE: Final = re.compile(
    r"(CUDA|CUBLAS|CUBLASLT|CUDNN|NVIDIA|NCCL|HIP|HSA|AMD|ROCR|ROCM|ROCBLAS|MIOPEN|GPU)_\w*"
    r"|(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|VECLIB|ONEDNN|DNNL|ATEN|ORT|GLOO|HF|HUGGINGFACE|TRANSFORMERS|RAY)_\w*"
    r"|(TORCH|PYTORCH|TRITON)\w*|CC|CXX|CPATH|C_INCLUDE_PATH|LIBRARY_PATH"  # Triton calls a compiler
)
_SECRET: Final = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def child_environment(computes: bool = True) -> dict[str, str]:
    """Return a child's environment: an allow-list, and more for one that `computes`."""
    inherited = {}
    for name, value in os.environ.items():
        is_known = _OF_THE_SYSTEM.fullmatch(name) or (computes and _OF_THE_ENGINE.fullmatch(name))
        if is_known and not _SECRET.search(name):
            inherited[name] = value
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _PACKAGE_PARENT.name not in ("site-packages", "dist-packages"):  # a checkout
        folders.insert(0, str(_PACKAGE_PARENT))
    path = os.pathsep.join(filter(None, folders))
    return inherited | {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def share_one_arena() -> None:
    """Let all threads share one of glibc's arenas, which saves a replica 50 MB. MALLOC_ARENA_MAX wins."""
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    os.environ["MALLOC_ARENA_MAX"] = "1"
    _set_malloc({_M_ARENA_MAX: 1})


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks: a 5 MB result's page faults cost 2.5 times the product that fills it."""
    _set_malloc({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1})


def _set_malloc(options: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and sys.platform.startswith("linux"):
        for option, value in options.items():
            mallopt(option, value)


def leave_stopping_to_the_parent() -> None:
    """Ignore the signals that stop a server: it needs its children to finish."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def end_with_the_parent() -> None:
    """End this process when its parent closes standard input, however it ends."""
    threading.Thread(target=_wait_for_the_parents_end, name="parent-watch", daemon=True).start()


def be_killed_with_the_parent() -> None:
    """Let Linux kill this process with the parent's thread that started it, even while stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def gain_no_privileges() -> None:
    """Forbid more rights by setuid programs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def hide_from_other_processes() -> None:
    """Hide memory and environment from this user's other processes (Linux). Root may still read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def confine() -> None:
    """Forbid other processes, TCP and files that are not open, by Landlock; needs `gain_no_privileges`."""
    if sys.platform != "linux":
        return
    # With root's rights, a process reads any environment.
    of_this_thread = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    ctypes.CDLL(None).capset(of_this_thread, (ctypes.c_uint32 * 6)())
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    version = system_call(_CREATE_RULESET, None, 0, _VERSION)
    if version < 1:
        return
    rules = (ctypes.c_uint64 * 3)(
        _FILES | (_TRUNCATE if version >= _TRUNCATE_SINCE else 0),
        _TCP if version >= _TCP_SINCE else 0,
        _OUTSIDE if version >= _OUTSIDE_SINCE else 0,
    )
    ruleset = system_call(_CREATE_RULESET, rules, ctypes.sizeof(rules), 0)
    failed = system_call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    if failed:  # a process that is not confined must not meet a codec
        raise OSError(ctypes.get_errno(), "Landlock refuses to confine this process")


def hide_value(flag: str) -> None:
    """Overwrite a flag's value on the command line, which all users can read (Linux)."""
    if sys.platform != "linux":
        return
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ARGUMENTS])
    words = ctypes.string_at(start, end - start).split(b"\0")
    shown = b"\0".join(_shown(word, before, flag.encode()) for before, word in pairwise([b"", *words]))
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _shown(word: bytes, before: bytes, flag: bytes) -> bytes:
    if before == flag:
        return _HIDDEN[: len(word)]
    name, equals, value = word.partition(b"=")
    return name + equals + _HIDDEN[: len(value)] if name == flag and equals else word


def _wait_for_the_parents_end() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
