"""Cores: what the affinity mask and the CPU quota leave, in trees of control groups made for the test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from asr_server import machine
from asr_server.dispatch.processes import MultiprocessExecutor
from asr_server.engine import EngineConfig
from asr_server.machine import available_cores, lower_thread_priority
from tests.embedded import embedded


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root folder of a machine with 64 cores and no quota yet; this process is in /service/api."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64 if pid == 0 else 1)))
    write(tmp_path / "proc/self/cgroup", "0::/service/api\n")
    return tmp_path


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


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


def test_without_a_quota_the_affinity_mask_says_how_many_cores_there_are(system: Path) -> None:
    assert available_cores(system) == 64
    write(system / "sys/fs/cgroup/service/api/cpu.max", "max 100000\n")
    assert available_cores(system) == 64


def test_the_quota_of_the_container_counts(system: Path) -> None:
    write(system / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert machine.cpu_quota(system) == 2.5
    assert available_cores(system) == 2


def test_the_smallest_quota_on_the_way_up_counts(system: Path) -> None:
    write(system / "sys/fs/cgroup/cpu.max", "800000 100000\n")
    write(system / "sys/fs/cgroup/service/cpu.max", "300000 100000\n")
    write(system / "sys/fs/cgroup/service/api/cpu.max", "max 100000\n")
    assert available_cores(system) == 3
    write(system / "proc/self/cgroup", "0::/service/cri:pod\n")  # as containerd names them
    write(system / "sys/fs/cgroup/service/cri:pod/cpu.max", "200000 100000\n")
    assert available_cores(system) == 2


def test_a_quota_below_one_core_leaves_one(system: Path) -> None:
    write(system / "sys/fs/cgroup/cpu.max", "20000 100000\n")
    assert available_cores(system) == 1


def test_version_one_of_control_groups_is_read_too(system: Path) -> None:
    write(system / "proc/self/cgroup", "5:cpuset:/\n4:cpu,cpuacct:/service\n1:name=systemd:/service\n")
    group = system / "sys/fs/cgroup/cpu,cpuacct"
    write(group / "cpu.cfs_quota_us", "-1\n")
    write(group / "cpu.cfs_period_us", "100000\n")
    assert available_cores(system) == 64
    write(group / "service" / "cpu.cfs_quota_us", "400000\n")
    write(group / "service" / "cpu.cfs_period_us", "100000\n")
    assert available_cores(system) == 4


GIB = 1 << 30


def test_the_smallest_memory_limit_on_the_way_up_counts(system: Path) -> None:
    write(system / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    assert machine.free_memory_bytes(system) == 32 * GIB
    groups = system / "sys/fs/cgroup"
    for group, limit, used in (("", "max", 20 * GIB), ("service", 2 * GIB, GIB), ("service/api", "max", GIB)):
        write(groups / group / "memory.max", f"{limit}\n")
        write(groups / group / "memory.current", f"{used}\n")
    assert machine.free_memory_bytes(system) == GIB
    write(groups / "service/memory.stat", f"anon {GIB // 2}\ninactive_file {GIB // 2}\nactive_file 0\n")
    assert machine.free_memory_bytes(system) == 3 * GIB // 2
    write(groups / "service/memory.current", f"{3 * GIB}\n")
    assert machine.free_memory_bytes(system) == 0


def test_memory_limits_of_version_one_are_read_too(system: Path) -> None:
    write(system / "proc/meminfo", f"MemAvailable: {32 << 20} kB\n")
    write(system / "proc/self/cgroup", "6:memory:/pod/server\n4:cpu,cpuacct:/pod\n")
    groups = system / "sys/fs/cgroup/memory"
    for group, limit in (("", 9223372036854771712), ("pod", 2 * GIB), ("pod/server", 4 * GIB)):
        write(groups / group / "memory.limit_in_bytes", f"{limit}\n")
        write(groups / group / "memory.usage_in_bytes", f"{GIB}\n")
    assert machine.free_memory_bytes(system) == GIB
    write(groups / "pod/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n")
    assert machine.free_memory_bytes(system) == 3 * GIB // 2


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("gpu-host", "10.0.0.1", "localhost.example")),
    ],
)
def test_this_machine_is_known_by_address_and_name(host: str, is_local: bool) -> None:
    assert machine.is_loopback(host) is is_local


@pytest.mark.parametrize("num_cores", [1, 4, 16])
def test_threads_follow_from_the_cores(num_cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    cores = available_cores()  # fewer where the tests themselves have a quota
    assert EngineConfig.from_settings(embedded(replicas=2)).cpu_threads == max(1, cores // 2)
    assert machine.default_preprocess_workers() == {1: 1, 16: 4}.get(cores, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_replicas_get_cores_of_their_own_from_the_affinity_mask(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = {2, 3, 4, 8, 9, 10, 11}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
    shares = [machine.cores_of(index, count) for index in range(count)]
    assert {len(share) for share in shares} == {len(mask) // count}
    assert len({core for share in shares for core in share}) == sum(map(len, shares))
    assert {core for share in shares for core in share} <= mask


def test_more_replicas_than_cores_are_not_pinned(system: Path) -> None:
    assert machine.cores_of(64, 65) == ()
    machine.pin_to(())


def test_a_thread_lowers_its_own_priority_and_no_other_threads() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1, initializer=lower_thread_priority, initargs=(2,)) as executor:
        of_thread = executor.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert of_thread.result() == min(19, before + 2)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_threads_that_are_there_and_those_to_come_interrupt_nobody() -> None:
    code = (
        "import os, threading; from asr_server.machine import never_interrupt_others as never\n"
        "ends = threading.Event(); policies = []\n"
        "def begin(): threading.Thread(target=lambda: ends.wait() and "
        "policies.append(os.sched_getscheduler(threading.get_native_id()))).start()\n"
        "begin(); never(); begin(); ends.set()\n"
        "[each.join() for each in threading.enumerate() if each is not threading.current_thread()]\n"
        "assert [os.sched_getscheduler(0), *policies] == 3 * [os.SCHED_BATCH], policies"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_thread_that_ends_while_the_process_is_pinned_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []

    def set_affinity(thread: int, cores: tuple[int, ...]) -> None:
        if thread != os.getpid():
            raise ProcessLookupError
        pinned.append(thread)

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    machine.pin_to((0,))
    ended.set()
    other.join()
    assert pinned == [os.getpid()]


@pytest.mark.parametrize(("mode", "pinned"), [("auto", True), ("on", True), ("off", False)])
def test_replicas_that_share_a_gpu_are_pinned(
    mode: Literal["auto", "on", "off"], pinned: bool, system: Path, set_gpus: Callable[..., None]
) -> None:
    set_gpus(1)
    executor = MultiprocessExecutor(embedded(replicas=2, pin_cores=mode))
    expected = [tuple(range(32)), tuple(range(32, 64))] if pinned else [(), ()]
    assert [executor.cores_of(index) for index in range(2)] == expected
    alone = MultiprocessExecutor(embedded(replicas=1, pin_cores="auto"))
    assert alone.cores_of(0) == ()
    on_cpu = MultiprocessExecutor(embedded(replicas=2, device="cpu", pin_cores="auto"))
    assert on_cpu.cores_of(0) == ()


@pytest.mark.parametrize(
    ("listed", "count", "gpus"),
    [(None, 0, []), (None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("GPU-a, GPU-b", 2, ["GPU-a", "GPU-b"])],
)
def test_gpus_are_named_as_the_environment_names_them(
    listed: str | None, count: int, gpus: list[str], set_gpus: Callable[..., None]
) -> None:
    set_gpus(count, listed)
    assert machine.visible_gpus() == gpus


def test_there_is_a_replica_for_each_gpu_unless_a_number_is_given(set_gpus: Callable[..., None]) -> None:
    set_gpus(4)
    assert embedded().num_replicas == 4
    assert embedded(replicas_per_device=2).num_replicas == 8
    assert embedded(replicas=3).num_replicas == 3
    assert embedded(device="cpu").num_replicas == 1
    set_gpus(0)
    assert embedded().num_replicas == 1


def test_each_replica_sees_its_own_gpu_and_knows_how_many_share_it(set_gpus: Callable[..., None]) -> None:
    set_gpus(2, "2,7")
    executor = MultiprocessExecutor(embedded(replicas=5))
    devices = [executor.device_of(index)["CUDA_VISIBLE_DEVICES"] for index in range(5)]
    assert devices == ["2", "7", "2", "7", "2"]
    assert [executor.num_on_device(index) for index in range(5)] == [3, 2, 3, 2, 3]
    on_cpu = MultiprocessExecutor(embedded(replicas=2, device="cpu"))
    assert on_cpu.device_of(1) == {}
    assert on_cpu.num_on_device(1) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "from asr_server.machine import freeze_gc; freeze_gc()",
        "from asr_server.replica import main as replica; from tests.embedded import embedded\n"
        "from asr_server.channel.zeromq import Address\n"
        "engine = replica.create_engine(replica.ReplicaSpec(0, Address('', ''), embedded(dtype='float32')))",
    ],
    ids=["by itself", "a replica"],
)
def test_what_lives_as_long_as_the_process_is_never_looked_at_by_the_garbage_collector(start: str) -> None:
    code = f"import asyncio, gc\n{start}\nassert gc.get_freeze_count() > 10_000 > 10 * len(gc.get_objects())"
    code += "\nassert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- What is asked of the machine ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "workers"), [(1, 1), (2, 2), (3, 2), (8, 2), (11, 2), (12, 3), (16, 4), (64, 4)]
)
def test_recordings_are_decoded_by_a_quarter_of_the_cores(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    assert machine.default_preprocess_workers() == workers


def test_a_quota_without_numbers_or_a_period_is_none(system: Path) -> None:
    for content in ("max 100000", "100000 0", "100000 max", "-1 100000"):
        write(system / "sys/fs/cgroup/cpu.max", content)
        assert machine.cpu_quota(system) == float("inf")
    write(system / "sys/fs/cgroup/cpu.max", "150000 100000")
    assert machine.cpu_quota(system) == 1.5


def test_where_memory_is_not_told_four_gibibytes_are_a_guess(tmp_path: Path) -> None:
    assert machine.free_memory_bytes(tmp_path) == 4 * GIB
    write(tmp_path / "proc/meminfo", "MemTotal: 8 kB\nMemAvailable: 3 kB\n")
    assert machine.free_memory_bytes(tmp_path) == 3 * 1024


def test_gpus_beyond_those_of_the_driver_are_not_there(set_gpus: Callable[..., None]) -> None:
    set_gpus(1, "3, ,5")
    assert machine.visible_gpus() == ["3"]
    set_gpus(2, " ")
    assert machine.visible_gpus() == ["0", "1"]


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGetCount"])
def test_a_driver_that_fails_has_no_gpu(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"cuInit": lambda flags: 0, "cuDeviceGetCount": lambda count: 0} | {failing: lambda _: 100}
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(**calls))
    assert machine.num_gpus() == 0

    def no_driver(name: str) -> None:
        raise OSError

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    assert machine.num_gpus() == 0


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
    pid.write_text(f"{os.getpid()}\n")
    (tmp_path / "control").unlink()
    assert not machine.mps_is_running()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="of Linux")
def test_the_processors_features_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model name : x\nflags : fpu avx2\nFeatures : asimd\nbugs : spectre\n"
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert machine.cpu_flags() >= {"fpu", "avx2", "asimd"}
    assert not machine.cpu_flags() & {"x", "spectre"}


@pytest.mark.parametrize(
    ("host", "is_local", "in_url"),
    [
        ("printer.localhost", True, "printer.localhost"),
        ("localhost.example", False, "localhost.example"),
        ("::1", True, "[::1]"),
        ("::2", False, "[::2]"),
    ],
)
def test_a_host_in_an_address(host: str, is_local: bool, in_url: str) -> None:
    assert (machine.is_loopback(host), machine.in_url(host)) == (is_local, in_url)


def test_ports_are_bound_for_ourselves_or_with_others() -> None:
    assert machine.listening_on("127.0.0.1", 7, True) == {"host": "127.0.0.1", "port": 7, "reuse_port": True}
    assert machine.listening_on("127.0.0.1", 7) == {"host": "127.0.0.1", "port": 7, "reuse_port": False}
    assert machine.sockets_for("127.0.0.1", 7) is None
    (one,) = machine.shared_sockets("127.0.0.1", 0)
    with one:
        port = one.getsockname()[1]
        assert port
        (other,) = machine.shared_sockets("127.0.0.1", port)
        with other:
            assert other.getsockname()[1] == port
            options = (socket.SO_REUSEADDR, socket.SO_REUSEPORT)
            assert all(other.getsockopt(socket.SOL_SOCKET, option) for option in options)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_include_those_of_the_fourth_version_and_one_of_the_sixth_does_not() -> None:
    is_shared: list[int] = []
    for own in (machine.sockets_for("::", 0), [machine.listening_on("::", 0, reuse_port=True)["sock"]]):
        assert own is not None
        with own[0]:
            own[0].listen()
            socket.create_connection(("127.0.0.1", own[0].getsockname()[1])).close()
            is_shared.append(own[0].getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT))
    assert is_shared == [0, 1]
    (single,) = machine.shared_sockets("::1", 0)
    with single:
        assert single.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
