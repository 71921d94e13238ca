"""Find this process's cores, memory and GPUs; set priorities, sockets, limits. Imports no torch."""

import contextlib
import ctypes
import gc
import ipaddress
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

MAX_OPEN_FILES: Final = 65_536
_ROOT: Final = Path("/")
_CGROUPS: Final = "sys/fs/cgroup"
_MODEST_BYTES: Final = 4 << 30  # a guess where the system does not say
GIB: Final = 1 << 30
_MPS_PIPES: Final = "/tmp/nvidia-mps"  # nosec B108 # NVIDIA's place; only looked at

VNNI_FLAGS: Final = {"avx512_vnni", "avx_vnni"}  # sums of 8-bit products in 32 bits, by `cpu_flags`
LARGEST_WITHOUT_VNNI: Final = 63  # of 8-bit weights: pairs of products are added in 16 bits there

T = TypeVar("T")


def available_cores(root: Path = _ROOT) -> int:
    """Return the cores that affinity and CPU quota allow, at least one: more threads would stand still."""
    has_mask = hasattr(os, "sched_getaffinity")
    num_cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    return max(1, int(min(num_cores, cpu_quota(root))))


def default_preprocess_workers() -> int:
    cores = available_cores()
    return max(min(cores, 2), min(cores // 4, 4))


def lower_priority(niceness: int) -> None:
    for thread in _own_threads():
        with contextlib.suppress(ProcessLookupError):
            _lower(thread, niceness)


def never_interrupt_others() -> None:
    """Make threads wait for a busy core (Linux's SCHED_BATCH).

    Computing threads wake thousands of times a second, and would interrupt the event loop's.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in _own_threads():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or a sandbox forbids it
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def lower_thread_priority(niceness: int) -> None:
    if sys.platform == "linux":
        _lower(threading.get_native_id(), niceness)


def _lower(thread: int, niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # whoever waits may give up, which changes nothing here

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Collect no garbage, a fifth of the time of importing torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_gc() -> None:
    """Exempt existing objects from garbage collection: a full one stops everything for 60 to 120 ms."""
    gc.collect()
    gc.freeze()


def _own_threads() -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        for thread in Path("/proc/self/task").iterdir():
            yield int(thread.name)


def mps_is_running() -> bool:
    """Return whether NVIDIA's Multi-Process Service runs; without it, processes take turns on a GPU."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES))
    pid = _read(folder / "nvidia-cuda-mps-control.pid").strip()
    return (folder / "control").exists() and (not pid.isdigit() or Path(f"/proc/{pid}").exists())


def cpu_quota(root: Path = _ROOT) -> float:
    quotas = [math.inf]
    for folder in _control_groups(root):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas)


def cpu_flags() -> set[str]:
    """Return the processor's features of /proc/cpuinfo; empty elsewhere."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Return the machine's memory, or the least limit of a control group."""
    return min([_meminfo(root).get("MemTotal", _MODEST_BYTES), *dict(_memory_groups(root)).values()])


def free_memory_bytes(root: Path = _ROOT) -> int:
    left = [limit - _used_bytes(folder) for folder, limit in _memory_groups(root)]
    return max(0, min([_meminfo(root).get("MemAvailable", _MODEST_BYTES), *left]))


def exit_reason(status: int) -> str:
    """Say how a child process ended, with its limit and its need where memory has probably run out."""
    if status >= 0:
        return f"exited with status {status}"
    if -status != signal.SIGKILL:
        return f"was ended by {signal.Signals(-status).name}"
    unit = 1 if sys.platform == "darwin" else 1 << 10
    most_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    return (
        "was killed, probably because memory ran out: "
        f"{memory_limit_bytes() / GIB:.1f} GiB is the limit, and the largest process that ended had "
        f"{most_bytes / GIB:.1f} GiB; raise the limit, or take a smaller model, --max-slots or --replicas"
    )


def visible_gpus() -> list[str]:
    """Return the GPUs as `CUDA_VISIBLE_DEVICES` names them."""
    count = num_gpus()
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return listed[:count] if listed else [str(index) for index in range(count)]


def num_gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def listening_on(host: str, port: int, reuse_port: bool = False) -> dict[str, Any]:
    """Return asyncio's arguments for a listener; `::` includes IPv4."""
    if host != "::" or not socket.has_dualstack_ipv6():
        return {"host": host, "port": port, "reuse_port": reuse_port}
    return {"sock": next(bound_sockets(host, port, reuse_port))}


def sockets_for(host: str, port: int, reuse_port: bool = False) -> list[socket.socket] | None:
    """Bind what uvicorn is to listen on; None where its own way does the same. Raises OSError."""
    if reuse_port:
        return list(bound_sockets(host, port, reuse_port))
    own = listening_on(host, port).get("sock")
    return [own] if own else None


def bound_sockets(host: str, port: int, reuse_port: bool) -> Iterator[socket.socket]:
    """Bind a socket at each address of the host. Raises OSError; UnicodeError for what is no name."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, where in addresses:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        try:
            bound.bind(where)
        except OSError:
            bound.close()
            raise
        yield bound


def raise_open_files_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def _meminfo(root: Path) -> dict[str, int]:
    fields = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    return {name: int(value.split()[0]) << 10 for name, _, value in fields}


def _memory_groups(root: Path) -> Iterator[tuple[Path, int]]:
    for folder in _control_groups(root):
        limit = _read(folder / "memory.max").strip()
        if limit.isdigit():
            yield folder, int(limit)


def _used_bytes(folder: Path) -> int:
    """Return what cannot be taken back: cached files can."""
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(_read(folder / "memory.current")) - int(fields.get("inactive_file", 0))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield each control group (version 2) upwards: all limits hold."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            hierarchy = root / _CGROUPS
            group = hierarchy / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(hierarchy))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
