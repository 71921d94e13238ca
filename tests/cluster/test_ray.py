"""What only the Ray executor has: no cluster to join, one of its own, hosts that differ."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asr_server.annexes.ray.actor import ReplicaActor
from asr_server.annexes.ray.cluster import LocalCluster
from asr_server.annexes.ray.executor import RayExecutor
from asr_server.checkpoint.cache import name_elsewhere
from asr_server.config import EMBEDDED_MODEL
from asr_server.dispatch.dispatcher import Dispatcher
from tests.support.embedded import embedded
from tests.support.until import until
from tests.unit.test_children import trap  # noqa: F401


def test_a_checkpoint_is_named_so_that_another_host_finds_it(tmp_path: Path) -> None:
    assert name_elsewhere(EMBEDDED_MODEL) == "whisper-digits"
    cached = tmp_path / "hub" / "models--openai--whisper-small" / "snapshots" / "973afd24"
    assert name_elsewhere(cached) == "openai/whisper-small"
    assert name_elsewhere(tmp_path / "own") == str(tmp_path / "own")


def test_a_host_with_another_version_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"the server is 0\.0\.0"):
        ReplicaActor().run(b"", "0.0.0")


async def test_a_cluster_that_is_not_there_is_told_in_a_line_and_given_up() -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        settings = embedded(executor="ray", ray_address=address)
        dispatcher = Dispatcher(settings, RayExecutor(settings))
        await dispatcher.start()
        await until(lambda: dispatcher.supervisor.given_up)
    assert dispatcher.supervisor.failed_to_start
    assert dispatcher.supervisor.last_failure.startswith(f"no Ray cluster at {address}: ")
    assert dispatcher.supervisor.last_failure.endswith(f"cannot connect to {address}: Connection refused")
    await dispatcher.stop()


@pytest.mark.slow
def test_without_ray_a_server_says_what_to_install_and_ends() -> None:
    """As on a machine without it: no import of it is found."""
    code = """if True:
        import importlib.util, sys
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "ray" else find_spec(name, *rest)
        sys.modules["ray"] = None  # an import of it fails
        sys.argv = ["asr-server", "serve", "--port", "0", "--executor", "ray"]
        from asr_server.__main__ import main
        main()"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith("needs Ray, an extra: pip install '.[ray]' in the checkout")
    assert "Traceback" not in ended.stderr


@pytest.mark.usefixtures("trap")
def test_a_ray_cluster_imports_nothing_from_the_working_directory() -> None:
    pytest.importorskip("ray")
    cluster = LocalCluster()
    cluster.stop()


@pytest.mark.trial
def test_a_cluster_that_is_gone_is_named_as_the_reason_of_a_failed_start() -> None:
    """In a process of its own, which Ray ends a minute after its head node."""
    pytest.importorskip("ray")
    code = """if True:
        import asyncio, os, psutil
        from tests.cluster.ray_cluster import ray_cluster
        from tests.support.dispatchers import named_replicas, running

        async def lose(cluster):
            async with running("ray", 2, cluster.address) as dispatcher, asyncio.timeout(60):
                for process in psutil.Process().children(recursive=True):
                    if process.name() == "gcs_server":
                        process.kill()
                named_replicas()[0].kill()
                while cluster.address not in dispatcher.supervisor.last_failure:
                    await asyncio.sleep(0.05)
                print(dispatcher.supervisor.last_failure)

        with ray_cluster() as cluster:
            asyncio.run(lose(cluster))
            os._exit(0)"""
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    assert re.search(r"cannot connect to 127\.0\.0\.1:\d+: Connection refused", ended.stdout)
