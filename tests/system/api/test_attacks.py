"""Attacks that need no key, each by eight sockets, beside sixteen clients that must not notice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from asr_server.config import MIB
from tests.conftest import Server, run_server
from tests.support.speech import say
from tests.unit.api.attackers import NAMES
from tests.unit.api.sample_files import sound_file

ATTACK_S = float(os.environ.get("ASR_TEST_ATTACK_S", "60"))
NUM_CLIENTS = 16
PAUSE_S = 0.2  # between a client's requests: what they ask for leaves the processor some time
MOST_LEFT_BYTES = 50 * MIB
MOST_TIMES, MOST_MORE_MS = 1.5, 5.0  # /health, against a bare uvicorn
ELSEWHERE = ("nice", "-n", "10")  # an attacker has a processor of his own, and needs one for masks of 20 MB
DIGITS = "2718"
RECORDING = sound_file(say(DIGITS).samples)
BARE = """
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})
"""


@pytest.mark.trial
@pytest.mark.parametrize("attack", NAMES)
async def test_an_attack_costs_others_nothing(attack: str, certificate: str, tmp_path: Path) -> None:
    tls = ("--ssl-certfile", certificate) if attack == "silent" else ()
    with run_server("--log-level", "warning", *tls, TMPDIR=str(tmp_path)) as server:
        process = psutil.Process(server.process.pid)
        async with bare_uvicorn(tmp_path, tls) as bare_url:
            await round_of(server, bare_url, min(5.0, ATTACK_S))  # what is loaded at its first use
            usual_ms, usual_bare_ms = await round_of(server, bare_url, min(20.0, ATTACK_S))
            before = process.memory_full_info().uss
            command = (sys.executable, "-m", "tests.unit.api.attackers", attack, server.url, str(ATTACK_S))
            attackers = await asyncio.create_subprocess_exec(*ELSEWHERE, *command)
            health_ms, bare_ms = await round_of(server, bare_url, ATTACK_S)
            assert await attackers.wait() == 0
        left = await settled_growth(process, before)
        print(
            f"{attack}: /health p99 {health_ms:.1f} ms, bare {bare_ms:.1f}; without the attack "
            f"{usual_ms:.1f} and {usual_bare_ms:.1f}; {left / MIB:.0f} MiB more"
        )
        assert left < MOST_LEFT_BYTES
        assert health_ms < max(MOST_TIMES * bare_ms, bare_ms + MOST_MORE_MS)
        assert "Traceback" not in server.written()


async def round_of(server: Server, bare_url: str, duration_s: float) -> tuple[float, float]:
    """The 99th percentiles of /health and of the bare server beside the clients, of whom none is lost."""
    command = (
        sys.executable,
        "-m",
        "tests.unit.api.prober",
        str(duration_s),
        f"{server.url}/health",
        bare_url,
    )
    prober = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    end = time.monotonic() + duration_s
    replies: Counter[tuple[int, str]] = Counter()
    await asyncio.gather(*(client(server.url, end, replies) for _ in range(NUM_CLIENTS)))
    written, _ = await prober.communicate()
    assert list(replies) == [(200, expected_text())], replies
    health_ms, bare_ms = json.loads(written)
    return health_ms, bare_ms


def expected_text() -> str:
    return say(DIGITS).text


async def client(url: str, end: float, replies: Counter[tuple[int, str]]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as session:
        while time.monotonic() < end:
            data, files = {"model": "whisper-1", "response_format": "text"}, {"file": RECORDING}
            reply = await session.post("/v1/audio/transcriptions", data=data, files=files)
            replies[reply.status_code, reply.text.strip()] += 1
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def bare_uvicorn(folder: Path, tls: tuple[str, ...]) -> AsyncIterator[str]:
    (folder / "bare.py").write_text(BARE)
    command = (
        sys.executable,
        "-m",
        "uvicorn",
        "--port",
        "0",
        "--no-access-log",
        "--app-dir",
        str(folder),
    )
    process = await asyncio.create_subprocess_exec(*command, *tls, "bare:app", stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"running on" not in (line := await process.stderr.readline()):
            assert line
        yield line.split(b"running on ")[1].split()[0].decode() + "/"
    finally:
        process.terminate()
        await process.wait()


async def settled_growth(process: psutil.Process, before: int) -> int:
    """The memory beyond `before`, once it has been given back or half a minute is over."""
    for _ in range(30):
        if process.memory_full_info().uss < before + MOST_LEFT_BYTES:
            break
        await asyncio.sleep(1)
    return int(process.memory_full_info().uss - before)
