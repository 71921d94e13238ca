"""The manifest job over Ray: an actor by itself, and a real cluster of two raylets that loses one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asr_server.cli.checks import ray_package
from tests.support.embedded import embedded
from tests.support.until import wait_until
from tests.system.cli.test_transcribe import COMMAND, heard, record
from tests.unit.cli.test_manifest import errors, results, write_manifest

NUM_LINES = 120


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (problem,) = ray_package(embedded(executor="ray"))
    assert problem.endswith("needs Ray, an extra: pip install '.[ray]' in the checkout")
    assert not list(ray_package(embedded()))


@pytest.mark.trial
def test_a_job_that_loses_its_driver_and_then_a_node_has_every_line_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    out = tmp_path / "out"
    record(tmp_path / "a.wav")
    names = [f"line-{index}" for index in range(NUM_LINES)]
    manifest = write_manifest(
        tmp_path / "files.jsonl", *({"audio": "a.wav", "id": name} for name in names), "no json"
    )
    node: Any = {"num_cpus": 2, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        other = cluster.add_node(**node)
        command = [*COMMAND, "--manifest", str(manifest), "-o", str(out), "--executor", "ray"]

        def start() -> subprocess.Popen[bytes]:
            environment = os.environ | {"RAY_ADDRESS": cluster.address}
            return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)

        driver = start()
        wait_until(lambda: len(results(out)) >= NUM_LINES // 8 or driver.poll() is not None)
        driver.kill()
        driver.communicate()
        num_kept = len(results(out))
        assert num_kept < NUM_LINES
        driver = start()
        wait_until(lambda: len(results(out)) >= num_kept + NUM_LINES // 8 or driver.poll() is not None)
        cluster.remove_node(other, allow_graceful=False)
        assert len(results(out)) < NUM_LINES
        _, told = driver.communicate(timeout=300)
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert driver.returncode == 1, told.decode()
    assert sorted(results(out)) == sorted(f"{name}.txt" for name in names)
    assert all(heard(text) for text in results(out).values())
    assert len(errors(out)) == 1
    numbers = told.decode().splitlines()[-1]
    assert "1 failed" in numbers
    assert "not begun" not in numbers
