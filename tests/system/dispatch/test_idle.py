"""What a server costs that nobody asks anything."""

import time

import psutil
import pytest

from tests.conftest import run_server

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
