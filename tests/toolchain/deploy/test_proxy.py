"""Two servers behind nginx or Envoy are replaced one after the other, and no request is lost."""

import asyncio
import contextlib
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from tests.conftest import Server, run_server
from tests.support.speech import say
from tests.toolchain.deploy.tools import DEPLOY, path_of, run_tool
from tests.unit.api.sample_files import sound_file

SPOKEN = say("314")
NUM_REQUESTS = 500
PAUSE_S: float = yaml.safe_load((DEPLOY / "chart/values.yaml").read_text())["preStopSeconds"]
AT_ONCE = 8

pytestmark = pytest.mark.trial


def free_port() -> int:
    """Return one that the system gives to nobody: while its server is replaced, nobody else may take it."""
    ports = list(range(20_000, 32_000))
    random.shuffle(ports)
    for port in ports:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("every port is in use")


def nginx(folder: Path, ports: tuple[int, int], port: int) -> list[str]:
    """Return the command that starts it."""
    site = (DEPLOY / "proxy/nginx.conf").read_text().replace("listen 8080", f"listen 127.0.0.1:{port}")
    for shown, own in zip((8000, 8001), ports, strict=True):
        site = site.replace(f"127.0.0.1:{shown}", f"127.0.0.1:{own}")
    (folder / "site.conf").write_text(site)
    config = folder / "nginx.conf"
    config.write_text(
        f"user root; daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; include {folder}/site.conf; }}\n"
    )
    run_tool("nginx", "-t", "-c", config)
    return ["nginx", "-c", str(config)]


def envoy(folder: Path, ports: tuple[int, int], port: int) -> list[str]:
    """Return the command that starts it."""
    text = (DEPLOY / "proxy/envoy.yaml").read_text().replace("0.0.0.0", "127.0.0.1")
    for shown, own in zip((8080, 8000, 8001), (port, *ports), strict=True):
        text = text.replace(f"port_value: {shown}", f"port_value: {own}")
    config = folder / "envoy.yaml"
    config.write_text(text)
    options = ["--config-path", str(config), "--disable-hot-restart", "--log-level", "error"]
    run_tool("envoy", "--mode", "validate", *options)
    return [path_of("envoy"), *options, "--concurrency", "1"]


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("proxy", [nginx, envoy])
async def test_none_of_500_requests_is_lost_while_both_servers_are_replaced(
    proxy: Callable[[Path, tuple[int, int], int], list[str]], tmp_path: Path
) -> None:
    ports, port = (free_port(), free_port()), free_port()
    results: list[str] = []
    are_replaced = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> None:
        reply = await client.post(
            "/v1/audio/transcriptions",
            files={"file": sound_file(SPOKEN.samples)},
            data={"model": "whisper-1"},
        )
        results.append(reply.json()["text"] if reply.status_code == 200 else reply.text)

    async def ask_on(client: httpx.AsyncClient) -> None:
        while not are_replaced.is_set() or len(results) < NUM_REQUESTS:
            await ask(client)

    def server(index: int) -> AbstractContextManager[Server]:
        return run_server("--port", str(ports[index]))

    with running(proxy(tmp_path, ports, port)):
        first, second = server(0), server(1)
        await asyncio.to_thread(first.__enter__)
        await asyncio.to_thread(second.__enter__)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            asking = asyncio.gather(*(ask_on(client) for _ in range(AT_ONCE)))
            await asyncio.to_thread(first.__exit__, None, None, None)
            first = server(0)
            await asyncio.to_thread(first.__enter__)
            await asyncio.sleep(PAUSE_S)
            await asyncio.to_thread(second.__exit__, None, None, None)
            second = server(1)
            await asyncio.to_thread(second.__enter__)
            await asyncio.sleep(PAUSE_S)
            are_replaced.set()
            await asking
        await asyncio.to_thread(second.__exit__, None, None, None)
        await asyncio.to_thread(first.__exit__, None, None, None)
    print(f"\n{len(results)} requests, both servers replaced")
    assert set(results) == {SPOKEN.text}
    assert len(results) >= NUM_REQUESTS
