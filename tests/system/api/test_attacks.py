"""Attacks that need no key, each by eight sockets, beside sixteen clients that must not notice."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil
import pytest

from asr_server.config import MIB
from benchmarks.health import probing_health
from benchmarks.reporting import quantile
from tests.conftest import Server, run_server
from tests.support.speech import say
from tests.unit.api.attackers import NAMES, attack_from_elsewhere
from tests.unit.api.bare_health import bare_uvicorn
from tests.unit.api.sample_files import sound_file

ATTACK_S = float(os.environ.get("ASR_TEST_ATTACK_S", "60"))
NUM_CLIENTS = 16
PAUSE_S = 0.2  # between a client's requests: what they ask for leaves the processor some time
MOST_LEFT_BYTES = 50 * MIB
MOST_TIMES, MOST_MORE_MS = 1.5, 5.0  # /health, against a bare uvicorn
DIGITS = "2718"
RECORDING = sound_file(say(DIGITS).samples)


@pytest.mark.trial
@pytest.mark.parametrize("attack", NAMES)
async def test_an_attack_costs_others_nothing(attack: str, tmp_path: Path) -> None:
    with run_server("--log-level", "warning", TMPDIR=str(tmp_path)) as server:
        process = psutil.Process(server.process.pid)
        with bare_uvicorn() as bare_url:
            await round_of(server, bare_url, min(5.0, ATTACK_S))  # what is loaded at its first use
            usual_ms, usual_bare_ms = await round_of(server, bare_url, min(20.0, ATTACK_S))
            before = process.memory_full_info().uss
            attacking = asyncio.create_task(attack_from_elsewhere(attack, server.url, ATTACK_S))
            health_ms, bare_ms = await round_of(server, bare_url, ATTACK_S)
            await attacking
        left = await settled_growth(process, before)
        print(
            f"{attack}: /health p99 {health_ms:.1f} ms, bare {bare_ms:.1f}; without the attack "
            f"{usual_ms:.1f} and {usual_bare_ms:.1f}; {left / MIB:.0f} MiB more"
        )
        assert left < MOST_LEFT_BYTES
        assert health_ms < max(MOST_TIMES * bare_ms, bare_ms + MOST_MORE_MS)
        assert "Traceback" not in server.written()


async def round_of(server: Server, bare_url: str, duration_s: float) -> list[float]:
    """The 99th percentiles of /health and of the bare server beside the clients, of whom none is lost."""
    replies: Counter[tuple[int, str]] = Counter()
    with probing_health(server.url) as own, probing_health(bare_url) as bare:
        started_at, end = time.perf_counter(), time.monotonic() + duration_s
        await asyncio.gather(*(client(server.url, end, replies) for _ in range(NUM_CLIENTS)))
        found = [1000 * quantile(probe.latencies_since(started_at), 0.99) for probe in (own, bare)]
    assert list(replies) == [(200, expected_text())], replies
    return found


def expected_text() -> str:
    return say(DIGITS).text


async def client(url: str, end: float, replies: Counter[tuple[int, str]]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as session:
        while time.monotonic() < end:
            data, files = {"model": "whisper-1", "response_format": "text"}, {"file": RECORDING}
            reply = await session.post("/v1/audio/transcriptions", data=data, files=files)
            replies[reply.status_code, reply.text.strip()] += 1
            await asyncio.sleep(PAUSE_S)


async def settled_growth(process: psutil.Process, before: int) -> int:
    """The memory beyond `before`, once it has been given back or half a minute is over."""
    for _ in range(30):
        if process.memory_full_info().uss < before + MOST_LEFT_BYTES:
            break
        await asyncio.sleep(1)
    return int(process.memory_full_info().uss - before)
