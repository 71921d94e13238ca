"""What is left of a server that was killed within 3 s: nothing; and what one costs that nobody asks."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.ray_cluster import RayCluster, ray_cluster
from tests.conftest import Server, run_server
from tests.support.until import is_alive, wait_until

LIMIT_S = 3.0  # of a trial on a machine that does nothing else
SHARED_MEMORY = Path("/dev/shm")


def test_a_killed_server_leaves_no_socket_and_not_even_a_replica_that_stands_still(tmp_path: Path) -> None:
    with run_server("--replicas", "2", TMPDIR=str(tmp_path)) as server:
        until_connected(tmp_path)
        children = descendants(server)
        next(child for child in children if "replica 1" in title_of(child)).suspend()
        server.process.kill()
        until_gone(children, 30.0)
        assert not list(tmp_path.rglob("asr-*"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as cluster:
        yield cluster


KINDS = {
    "processes": ("--replicas", "2"),
    "ranks": ("--tensor-parallel-size", "2", "--device", "cpu"),
    "a Ray cluster of its own": ("--executor", "ray", "--ray-address", "local"),
    "a Ray cluster that goes on": ("--executor", "ray", "--replicas", "2"),
}


@pytest.mark.trial
@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_are_gone_within_3_s(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    options = KINDS[kind]
    others: list[psutil.Process] = []
    if kind == "a Ray cluster that goes on":
        options += ("--ray-address", request.getfixturevalue("cluster").address)
        others = psutil.Process().children(recursive=True)
    before = shared_memory()
    # Ray's own sockets lie below TMPDIR, with names that are too long for this one.
    folder = {} if "Ray" in kind else {"TMPDIR": str(tmp_path)}
    with run_server(*options, **folder) as server:
        until_connected(tmp_path)
        workers = descendants(server) + actors(others)
        assert any("replica" in title_of(worker) for worker in workers)
        server.process.kill()
        seconds = until_gone(workers, LIMIT_S)
    print(f"{kind}: {len(workers)} processes gone {seconds:.2f} s after SIGKILL")
    assert not list(tmp_path.rglob("asr-*"))
    assert not shared_memory() - before


def until_connected(folder: Path) -> None:
    """Until no replica needs the names of its sockets any more."""
    wait_until(lambda: not list(folder.glob("asr-ipc-*")))


def descendants(server: Server) -> list[psutil.Process]:
    return list(psutil.Process(server.process.pid).children(recursive=True))


def actors(but_not: list[psutil.Process]) -> list[psutil.Process]:
    """Replicas within a Ray cluster that is not the server's."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if each not in but_not and "ray::asr-server" in title_of(each)]


def title_of(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def until_gone(processes: list[psutil.Process], limit_s: float) -> float:
    started = time.perf_counter()
    while alive := [process for process in processes if is_alive(process)]:
        if time.perf_counter() - started > limit_s:
            for process in alive:
                process.kill()
            raise AssertionError(f"left after {limit_s} s: {list(map(title_of, alive))}")
        time.sleep(0.01)
    return time.perf_counter() - started


def shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


WATCHED_S = 30.0
MAX_SHARE = 0.01  # of a core


@pytest.mark.trial
@pytest.mark.parametrize("options", [(), ("--executor", "ray", "--ray-address", "local")], ids=["ipc", "tcp"])
def test_an_idle_replica_costs_less_than_one_percent_of_a_core(options: tuple[str, ...]) -> None:
    with run_server(*options) as server:
        api = psutil.Process(server.process.pid)
        replicas = [each for each in api.children(recursive=True) if "replica 0" in " ".join(each.cmdline())]
        time.sleep(5)  # what follows a start
        before = [cpu_s(each) for each in (api, *replicas)]
        time.sleep(WATCHED_S)
        shares = [
            (cpu_s(each) - start) / WATCHED_S for each, start in zip((api, *replicas), before, strict=True)
        ]
    print(f"of a core: API {shares[0]:.2%}, replica {shares[1]:.2%}")
    assert max(shares) < MAX_SHARE


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
