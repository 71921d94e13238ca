"""Cores that a replica gets, and how soon the API process answers, by the niceness of replicas.

    python -m benchmarks.niceness             whisper-base, 32 clients, alone and beside busy loops
    python -m benchmarks.niceness --quick     three nicenesses once, in some three minutes

The server's clients have a niceness of 10, because they stand for other machines. `/health` of a bare uvicorn
is measured beside the server's. Rounds are interleaved.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from asr_server.machine import available_cores, lower_priority
from benchmarks.bare_health import bare_uvicorn
from benchmarks.client import connected, transcribe
from benchmarks.health import probing_health
from benchmarks.reporting import Budget, benchmark_parser, command, machine, quantile, spread
from benchmarks.running_server import running_server

NICENESSES = (0, 1, 2, 5, 10)
QUICK_NICENESSES = (0, 5, 10)
QUICK_BUDGET_S = 240.0
NUM_CLIENTS = 32
CLIENTS_NICENESS = 10
SPEECH = Path(__file__).parents[1] / "examples" / "speech.wav"
BUSY_LOOP = "while True: pass"
REPLICA_TITLE = "asr-server replica 0"

Scene = tuple[int, int]  # busy loops beside the server, niceness
Figures = dict[str, float]


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep so many cores busy, as a compiler does."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def ask_for(url: str, duration_s: float) -> None:
    """Have every client ask again and again for so long."""
    speech, ends_at = SPEECH.read_bytes(), time.perf_counter() + duration_s
    async with connected(url) as client:

        async def ask() -> None:
            while True:
                await transcribe(client, SPEECH.name, speech)

        asking = [asyncio.create_task(ask()) for _ in range(NUM_CLIENTS)]
        await asyncio.wait(asking, timeout=ends_at - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
        for each in asking:
            each.cancel()
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
    for error in outcomes:
        if isinstance(error, Exception):
            raise error


def run_clients(url: str, duration_s: float) -> None:
    asyncio.run(ask_for(url, duration_s))


def processor_s() -> float:
    """Return the processor time of the replica, a child of a child of this process."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if " ".join(child.cmdline()).startswith(REPLICA_TITLE):
                times = child.cpu_times()
                return float(times.user + times.system)
    raise RuntimeError(f"no process has the title {REPLICA_TITLE!r}")


def measure(niceness: int, model: str, duration_s: float) -> dict[Scene, Figures]:
    """Start a server and measure it alone, then beside busy loops."""
    server = running_server("--model", model, "--replica-niceness", str(niceness), "--log-level", "warning")
    with (
        server as url,
        bare_uvicorn() as bare_url,
        ProcessPoolExecutor(1, initializer=lower_priority, initargs=(CLIENTS_NICENESS,)) as clients,
        probing_health(url) as probe,
        probing_health(bare_url) as bare_probe,
    ):
        clients.submit(run_clients, url, 1.0).result()  # the first requests take longer
        found: dict[Scene, Figures] = {}
        for num_loops in (0, available_cores()):
            with busy_loops(num_loops):
                started_at, before_s = time.perf_counter(), processor_s()
                clients.submit(run_clients, url, duration_s).result()
                num_cores = (processor_s() - before_s) / (time.perf_counter() - started_at)
            waits_s, bare_waits_s = (each.latencies_since(started_at) for each in (probe, bare_probe))
            found[num_loops, niceness] = {
                "cores": num_cores,
                "/health p50, ms": 1000 * quantile(waits_s, 0.5),
                "/health p99, ms": 1000 * quantile(waits_s, 0.99),
                "bare p99, ms": 1000 * quantile(bare_waits_s, 0.99),
            }
    return found


def table(results: dict[Scene, list[Figures]]) -> Table:
    names = list(next(iter(results.values()))[0])
    shown = Table("busy loops", "niceness", *names)
    for (num_loops, niceness), rounds in sorted(results.items()):
        shown.add_row(str(num_loops), str(niceness), *(_cell(rounds, name) for name in names))
    return shown


def _cell(rounds: Sequence[Figures], name: str) -> str:
    return spread([figures[name] for figures in rounds], digits=2)


def main() -> None:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--quick", action="store_true", help="one short round of three")
    parser.add_argument("--model", default="base")
    arguments = parser.parse_args()
    num_rounds, duration_s = (1, 4.0) if arguments.quick else (3, 12.0)
    nicenesses = QUICK_NICENESSES if arguments.quick else NICENESSES
    console = Console(width=120)
    console.print(command(), machine())
    budget = Budget(
        min(arguments.budget_s, QUICK_BUDGET_S) if arguments.quick else arguments.budget_s, console
    )
    results: dict[Scene, list[Figures]] = {}
    longest_s = 0.0
    for niceness in nicenesses * num_rounds:
        if not budget.allows(f"niceness {niceness}", longest_s):
            continue
        started_at = time.perf_counter()
        for scene, figures in measure(niceness, arguments.model, duration_s).items():
            results.setdefault(scene, []).append(figures)
        longest_s = max(longest_s, time.perf_counter() - started_at)
    if results:
        console.print(table(results))


if __name__ == "__main__":
    main()
