"""What this process finds on its machine, and what it sets: cores, memory, GPUs, priorities, sockets."""

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asr_server import machine
from asr_server.dispatch.executors import MultiprocessExecutor
from asr_server.machine import GIB, available_cores, free_memory_bytes, memory_limit_bytes
from tests.support.embedded import embedded


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root folder of a machine with 64 cores and no quota yet; this process is in /service/api."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64 if pid == 0 else 1)))
    write(tmp_path / "proc/self/cgroup", "0::/service/api\n")
    return tmp_path


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(
    ("quotas", "quota", "cores"),
    [
        ({}, float("inf"), 64),
        ({"service/api/cpu.max": "max 100000\n"}, float("inf"), 64),
        ({"cpu.max": "250000 100000\n"}, 2.5, 2),
        ({"cpu.max": "800000 100000\n", "service/cpu.max": "300000 100000\n"}, 3.0, 3),
        ({"service/api/cpu.max": "50000 100000\n"}, 0.5, 1),
    ],
)
def test_the_smallest_quota_on_the_way_up_counts(
    quotas: dict[str, str], quota: float, cores: int, system: Path
) -> None:
    for name, content in quotas.items():
        write(system / "sys/fs/cgroup" / name, content)
    assert machine.cpu_quota(system) == quota
    assert available_cores(system) == cores


def test_where_the_system_says_nothing_four_gibibytes_and_all_cores_are_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, cores in ((3, 3), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert available_cores(tmp_path) == cores
    assert free_memory_bytes(tmp_path) == memory_limit_bytes(tmp_path) == 4 * GIB


def test_free_memory_is_the_least_of_machine_and_limits_cached_files_included(system: Path) -> None:
    write(
        system / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\nHugePages_Free: 0\n"
    )
    assert (memory_limit_bytes(system), free_memory_bytes(system)) == (16 * GIB, 8 * GIB)
    groups = system / "sys/fs/cgroup"
    write(groups / "service/memory.max", "max\n")
    write(groups / "memory.max", f"{4 * GIB}\n")
    write(groups / "memory.current", f"{3 * GIB}\n")
    assert (memory_limit_bytes(system), free_memory_bytes(system)) == (4 * GIB, GIB)
    write(groups / "memory.stat", f"anon 5\ninactive_file {GIB // 2}\n")
    assert free_memory_bytes(system) == 3 * GIB // 2
    write(groups / "memory.current", f"{5 * GIB}\n")
    assert free_memory_bytes(system) == 0


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (3, "exited with status 3"),
        (-11, "was ended by SIGSEGV"),
        (-9, "was killed, probably because memory ran out: 2.0 GiB is the limit, and the largest process"),
    ],
)
def test_the_end_of_a_process_is_explained(status: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=1887437))
    assert machine.exit_reason(status).startswith(reason)
    assert ("had 1.8 GiB; raise the limit, or take" in machine.exit_reason(status)) == (status == -9)


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 2), (3, 2), (8, 2), (11, 2), (12, 3), (16, 4), (64, 4)]
)
def test_recordings_are_decoded_by_a_quarter_of_the_cores(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    assert machine.default_preprocess_workers() == workers


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="of Linux")
def test_the_processors_features_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model name : x\nflags : fpu avx2\nFeatures : asimd\nbugs : spectre\n"
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert machine.cpu_flags() >= {"fpu", "avx2", "asimd"}
    assert not machine.cpu_flags() & {"x", "spectre"}


# -- GPUs --


@pytest.fixture
def set_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the driver count as many GPUs, and the environment name them."""
    count = 0

    def get_count(found: Any) -> int:
        found._obj.value = count
        return 0

    def set_them(number: int, listed: str | None = None) -> None:
        nonlocal count
        count = number
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if listed is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)

    driver = SimpleNamespace(cuInit=lambda flags: flags, cuDeviceGetCount=get_count)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    return set_them


@pytest.mark.parametrize(
    ("listed", "count", "gpus"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        (" ", 2, ["0", "1"]),
        ("3, ,5", 1, ["3"]),
        ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_gpus_are_named_as_the_environment_names_them(
    listed: str | None, count: int, gpus: list[str], set_gpus: Callable[..., None]
) -> None:
    set_gpus(count, listed)
    assert machine.visible_gpus() == gpus


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetCount", "CDLL"])
def test_a_driver_that_fails_has_no_gpu(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> SimpleNamespace:
        if failing == "CDLL":
            raise OSError
        calls = {"cuInit": lambda flags: 0, "cuDeviceGetCount": lambda count: 0}
        return SimpleNamespace(**calls | {failing: lambda _: 100})

    monkeypatch.setattr("ctypes.CDLL", load)
    assert machine.num_gpus() == 0


@pytest.mark.parametrize(
    ("gpus", "settings", "devices", "num_on_device"),
    [
        ("2,7", {"replicas": 5}, ["2", "7", "2", "7", "2"], [3, 2, 3, 2, 3]),
        ("0,1,2,3,4", {"replicas": 2, "tensor_parallel_size": 2}, ["0,1", "2,3"], [1, 1]),
        ("0", {"replicas": 2, "device": "cpu"}, [None, None], [2, 2]),
    ],
)
def test_each_replica_sees_its_own_gpus_and_knows_how_many_share_them(
    gpus: str,
    settings: dict[str, Any],
    devices: list[str | None],
    num_on_device: list[int],
    set_gpus: Callable[..., None],
) -> None:
    set_gpus(len(gpus.split(",")), gpus)
    executor = MultiprocessExecutor(embedded(**settings))
    indices = range(settings["replicas"])
    assert [executor.device_of(index).get("CUDA_VISIBLE_DEVICES") for index in indices] == devices
    assert [executor.num_on_device(index) for index in indices] == num_on_device


def test_the_service_that_shares_a_gpu_is_there_while_its_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not machine.mps_is_running()
    (tmp_path / "control").touch()
    assert machine.mps_is_running()
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    pid.write_text(f"{os.getpid()}\n")
    assert machine.mps_is_running()
    pid.write_text("99999999")
    assert not machine.mps_is_running()


# -- Threads and memory of this process --


def test_a_thread_lowers_its_own_priority_and_no_other_threads() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1, initializer=machine.lower_thread_priority, initargs=(2,)) as executor:
        of_thread = executor.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert of_thread.result() == min(19, before + 2)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_all_threads_of_a_process_give_way_and_interrupt_nobody() -> None:
    code = (
        "import os, threading; from asr_server import machine\n"
        "ends = threading.Event(); seen = []\n"
        "def look(): id = threading.get_native_id(); "
        "seen.append((os.sched_getscheduler(id), os.getpriority(os.PRIO_PROCESS, id)))\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "def begin(): threading.Thread(target=lambda: ends.wait() and look()).start()\n"
        "begin(); machine.lower_priority(2); machine.never_interrupt_others(); begin(); ends.set()\n"
        "[each.join() for each in threading.enumerate() if each is not threading.current_thread()]; look()\n"
        "assert seen == 3 * [(os.SCHED_BATCH, min(19, before + 2))], seen"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "limit"),
    [
        (1024, 4096, (4096, 4096), 4096),
        (1024, INFINITE, (65_536, INFINITE), 65_536),
        (1 << 20, 1 << 20, None, 1 << 20),
        (INFINITE, INFINITE, None, 65_536),
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


# -- Addresses and sockets --


@pytest.mark.parametrize(
    ("host", "is_local", "in_url"),
    [
        *((host, True, host) for host in ("127.0.0.1", "127.8.8.8", "localhost", "printer.localhost")),
        *((host, False, host) for host in ("gpu-host", "10.0.0.1", "localhost.example")),
        ("::1", True, "[::1]"),
        ("::2", False, "[::2]"),
    ],
)
def test_this_machine_is_known_by_address_and_name(host: str, is_local: bool, in_url: str) -> None:
    assert (machine.is_loopback(host), machine.in_url(host)) == (is_local, in_url)


def test_ports_are_bound_for_ourselves_or_with_others() -> None:
    assert machine.listening_on("127.0.0.1", 7, True) == {"host": "127.0.0.1", "port": 7, "reuse_port": True}
    assert machine.sockets_for("127.0.0.1", 7) is None
    (one,) = machine.bound_sockets("127.0.0.1", 0, reuse_port=True)
    with one:
        port = one.getsockname()[1]
        (other,) = machine.bound_sockets("127.0.0.1", port, reuse_port=True)
        with other:
            assert other.getsockname()[1] == port


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_include_those_of_the_fourth_version_and_one_of_the_sixth_does_not() -> None:
    for own in (machine.sockets_for("::", 0), [machine.listening_on("::", 0, reuse_port=True)["sock"]]):
        assert own is not None
        with own[0]:
            own[0].listen()
            socket.create_connection(("127.0.0.1", own[0].getsockname()[1])).close()
    (single,) = machine.bound_sockets("::1", 0, reuse_port=True)
    with single:
        assert single.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
