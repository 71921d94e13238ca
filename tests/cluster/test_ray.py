"""What only the Ray executor has: no cluster to join, one of its own, hosts that differ."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from asr_server.annexes.ray.cluster import local_cluster
from asr_server.annexes.ray.executor import RayExecutor
from asr_server.checkpoint.files import name_elsewhere
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


async def test_a_cluster_that_is_not_there_is_told_in_a_line_and_given_up() -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        settings = embedded(executor="ray", ray_address=address)
        dispatcher = Dispatcher(settings, lambda _: RayExecutor(settings))
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
def test_a_cluster_of_its_own_is_ended_by_the_server_alone_and_imports_nothing_from_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    with local_cluster():
        (owner,) = (
            each
            for each in psutil.Process().children()
            if "asr-server ray cluster" in " ".join(each.cmdline())
        )
        assert "VLLM_API_KEY" not in owner.environ()
        processes = [owner, *owner.children(recursive=True)]
        for number in (signal.SIGINT, signal.SIGTERM):
            owner.send_signal(number)
        with pytest.raises(psutil.TimeoutExpired):
            owner.wait(0.5)
    assert not psutil.wait_procs(processes, 20)[1]
