"""Finds what this process may use of the machine: cores, memory, GPUs, files.

Used in every process. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import ipaddress
import math
import os
import resource
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
_MPS_PIPES: Final = "/tmp/nvidia-mps"  # nosec B108 # NVIDIA's place; only looked at

VNNI_FLAGS: Final = {"avx512_vnni", "avx_vnni"}  # sums of 8-bit products in 32 bits, by `cpu_flags`
LARGEST_WITHOUT_VNNI: Final = 63  # of 8-bit weights: pairs of products are added in 16 bits there

T = TypeVar("T")


def available_cores(root: Path = _ROOT) -> int:
    """Cores this process may use: those it may run on, as far as its CPU quota pays for them; at least one.

    A container limited to two CPUs sees all of the host's cores in its affinity mask. A thread for each of
    them would use up the quota in a fraction of every period and then stand still for the rest of it.
    """
    return max(1, int(min(len(_affinity_mask()), cpu_quota(root))))


def cores_of(index: int, count: int) -> tuple[int, ...]:
    """The cores that one of `count` processes gets for itself: alike in number, neighbours, nobody else's.

    All cores of the affinity mask are dealt out, whatever the CPU quota: other groups of processes that are
    limited by a quota would else crowd the same first ones. None, where there are fewer cores than processes.
    """
    cores = sorted(_affinity_mask())
    share = len(cores) // count
    return tuple(cores[index * share : (index + 1) * share])


def pin_to(cores: tuple[int, ...]) -> None:
    """Keeps this process to these cores: its threads, some of which libraries start when imported, and all
    that they start from now on. None: leaves it as it is.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _own_threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, cores)


def lower_priority(niceness: int) -> None:
    """Lets other processes go before this one where cores are short: its threads, as with `pin_to`.

    Anybody may lower a priority. Nothing is lost while there is a core for everyone.
    """
    for thread in _own_threads():
        with contextlib.suppress(ProcessLookupError):
            _lower(thread, niceness)


def never_interrupt_others() -> None:
    """Threads of this process wait for a core that is taken, also when they wake (Linux's SCHED_BATCH).

    Threads that compute together sleep and wake thousands of times a second. What they interrupt may be a
    thread of the API process that holds Python's interpreter lock, for which its event loop then waits.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in _own_threads():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or a sandbox forbids it
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def lower_thread_priority(niceness: int) -> None:
    """As `lower_priority`, for the calling thread alone; only Linux has priorities of threads."""
    if sys.platform == "linux":
        _lower(threading.get_native_id(), niceness)


def _lower(thread: int, niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def in_daemon_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Calls what may never return in a thread of its own, which does not keep the process from ending."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # whoever waits may give up, which changes nothing here

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def freeze_gc() -> None:
    """Exempts all that exists by now from garbage collection: modules, routes and models live as long as the
    process. A full collection would look at all of it, while everything stands still: 60 ms with the 70 000
    objects of the API process, 120 ms with a replica's.
    """
    gc.collect()
    gc.freeze()


def _own_threads() -> Iterator[int]:
    """Yields this process's threads by their system ids; none where the system has no such list."""
    with contextlib.suppress(FileNotFoundError):
        for thread in Path("/proc/self/task").iterdir():
            yield int(thread.name)


def mps_is_running() -> bool:
    """Whether NVIDIA's Multi-Process Service is there for the processes of this one: with it the kernels of
    several processes run on a GPU at the same time, without it they take turns.
    """
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", _MPS_PIPES))
    pid = _read(folder / "nvidia-cuda-mps-control.pid").strip()
    return (folder / "control").exists() and (not pid.isdigit() or Path(f"/proc/{pid}").exists())


def cpu_quota(root: Path = _ROOT) -> float:
    """CPUs' worth of time that the control groups of this process allow; infinity: no limit.

    `root` has the folders `proc` and `sys`.
    """
    return min(_quotas(root), default=math.inf)


def cpu_flags() -> set[str]:
    """Returns the processor's features, as /proc/cpuinfo spells them; empty on other systems than Linux."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Return how much memory the host has free, as far as this process's control groups allow.

    `root` has the folders `proc` and `sys`.
    """
    fields = dict(line.split(":") for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return 4 << 30  # no Linux: a modest guess
    available = int(fields["MemAvailable"].split()[0]) << 10
    return max(0, min([available, *_memory_left(root)]))


def visible_gpus() -> list[str]:
    """The GPUs of this process, each as `CUDA_VISIBLE_DEVICES` names it; none where there is no driver."""
    count = num_gpus()
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return listed[:count] if listed else [str(index) for index in range(count)]


def num_gpus() -> int:
    """Counts the GPUs by the NVIDIA driver, which takes milliseconds; torch would take seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def is_loopback(host: str) -> bool:
    """Return whether it is this machine by name or address; no name is looked up."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listening_on(host: str, port: int, reuse_port: bool = False) -> dict[str, Any]:
    """Return asyncio's arguments for a listener. `::` is every address, IPv4's too, as elsewhere on Linux;
    asyncio's own socket would take IPv6 alone.
    """
    if host != "::" or not socket.has_dualstack_ipv6():
        return {"host": host, "port": port, "reuse_port": reuse_port}
    return {"sock": next(shared_sockets(host, port)) if reuse_port else _all_addresses(port)}


def _all_addresses(port: int) -> socket.socket:
    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)


def shared_sockets(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to each address of the host, on a port that other processes may bind too. Until one of
    these sockets listens, all connections go to the others. Raises OSError.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, where in addresses:
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        bound.bind(where)
        yield bound


def raise_open_files_limit() -> int:
    """Raise it as far as the system allows: the usual 1024 are for programs that use select(). Return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def _affinity_mask() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quotas(root: Path) -> Iterator[float]:
    for folder in _control_groups(root, "cpu"):
        quota, period = _quota_and_period(folder)
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)


def _memory_left(root: Path) -> Iterator[int]:
    """Yield the bytes left under each limit. Files that are only cached count as free: they are given up."""
    for folder in _control_groups(root, "memory"):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_file).strip(), _read(folder / used_file).strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _cached_bytes(folder)


def _cached_bytes(folder: Path) -> int:
    """Read what version 1 counts for a group with all groups within it, as version 2 always does."""
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield each group on the way up from this process's: all their limits hold at once."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy
            yield from _upwards(root / _CGROUPS, path)
        elif controller in controllers.split(","):
            yield from _upwards(root / _CGROUPS / controllers, path)
            yield from _upwards(root / _CGROUPS / controller, path)


def _upwards(hierarchy: Path, path: str) -> Iterator[Path]:
    group = hierarchy / path.lstrip("/")
    for folder in (group, *group.parents):
        yield folder
        if folder == hierarchy:
            break


def _quota_and_period(folder: Path) -> tuple[str, str]:
    """Reads both in microseconds; without a limit the quota is `max` (version 2) or -1 (version 1)."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if quota:
        return quota, period
    return _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
