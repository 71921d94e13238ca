"""Latency and throughput of the executors, side by side: in this process, in processes, as actors of Ray.

    python -m benchmarks.executors        inline, multiprocess, ray; 1 and 2 replicas of the embedded model

Latency is that of one chunk at a time, from its submission to its result; throughput is that of many, from
the first submission to the last result. Beside them: the time from the start to the first replica that takes
work. For Ray one cluster of this machine is started before, and not counted. Each case is started anew in a
round, and rounds are interleaved. Without Ray installed its cases are left out.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.config import EMBEDDED_MODEL, Settings
from asr_server.core import Chunk, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.ray_cluster import cluster_address
from benchmarks.clips import make_clip
from benchmarks.reporting import (
    Budget,
    benchmark_parser,
    command,
    error_bars,
    machine,
    pyplot,
    quantile,
    spread,
    write_json,
)

OPTIONS = DecodingOptions(language="en", max_new_tokens=32)
CHUNK_S = 7.0
WARM_UP = 4  # chunks


class Case(NamedTuple):
    executor: Literal["inline", "multiprocess", "ray"]
    replicas: int

    def __str__(self) -> str:
        return f"{self.executor}, {self.replicas}"


class Work(NamedTuple):
    num_alone: int  # chunks sent one after another
    num_together: int  # chunks sent at once


async def run_case(case: Case, work: Work, ray_address: str) -> dict[str, Any]:
    settings = Settings(
        model=str(EMBEDDED_MODEL),
        executor=case.executor,
        replicas=case.replicas,
        dtype="float32",
        ray_address=ray_address,
    )
    dispatcher = Dispatcher(settings)
    started = time.perf_counter()
    await dispatcher.start()
    try:
        await _until_ready(dispatcher, 1)
        start_s = time.perf_counter() - started
        await _until_ready(dispatcher, case.replicas)
        await _send_together(dispatcher, WARM_UP)
        latencies_s = [await _send(dispatcher, index) for index in range(work.num_alone)]
        elapsed_s = await _send_together(dispatcher, work.num_together)
    finally:
        await dispatcher.stop()
    return {"start_s": start_s, "latencies_s": latencies_s, "chunks_per_s": work.num_together / elapsed_s}


async def _until_ready(dispatcher: Dispatcher, num_replicas: int) -> None:
    while sum(state.ready for state in dispatcher.supervisor.replica_states) < num_replicas:
        if dispatcher.supervisor.given_up:
            raise RuntimeError(dispatcher.supervisor.last_failure)
        await asyncio.sleep(0.01)


async def _send(dispatcher: Dispatcher, index: int) -> float:
    """Seconds until its result."""
    clip = Chunk(0, 0, make_clip(index, CHUNK_S))
    started = time.perf_counter()
    await dispatcher.open(f"request {index}").submit(clip, OPTIONS)
    return time.perf_counter() - started


async def _send_together(dispatcher: Dispatcher, num_chunks: int) -> float:
    clips = [Chunk(0, 0, make_clip(index, CHUNK_S)) for index in range(num_chunks)]
    started = time.perf_counter()
    await asyncio.gather(
        *(dispatcher.open(f"together {i}").submit(clip, OPTIONS) for i, clip in enumerate(clips))
    )
    return time.perf_counter() - started


@contextmanager
def ray_cluster(console: Console, wanted: bool) -> Iterator[str | None]:
    """Its address; None where Ray is not wanted or not installed."""
    is_installed = find_spec("ray") is not None
    if wanted and not is_installed:
        console.print("left out, as Ray is not installed: ray")
    with cluster_address("local") if wanted and is_installed else nullcontext() as address:
        yield address


def measure(
    cases: list[Case], work: Work, rounds: int, address: str, path: Path | None, budget: Budget
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("cases", total=len(cases) * rounds)
        for _ in range(rounds):
            for case in (case for case in cases if budget.allows(case)):
                progress.update(bar, description=str(case))
                outcome = asyncio.run(run_case(case, work, address))
                for name, value in outcome.items():
                    figures.setdefault(str(case), {}).setdefault(name, []).append(value)
                write_json(path, figures)
                progress.advance(bar)
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    table = Table("executor, replicas", "latency, ms", "p95, ms", "chunks a second", "start, s")
    for name, own in figures.items():
        medians_ms = [1000 * statistics.median(values) for values in own["latencies_s"]]
        p95_ms = [1000 * quantile(values, 0.95) for values in own["latencies_s"]]
        row = (spread(medians_ms), spread(p95_ms), spread(own["chunks_per_s"]), spread(own["start_s"]))
        table.add_row(name, *row)
    console.print(table)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Median latency and throughput of each case, with the least and the most of all rounds."""
    names = list(figures)
    figure, (latency, throughput) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    series_ms = [[1000 * statistics.median(v) for v in figures[name]["latencies_s"]] for name in names]
    for axes, series in ((latency, series_ms), (throughput, [figures[n]["chunks_per_s"] for n in names])):
        medians, errors = error_bars(series)
        axes.barh(names, medians, xerr=errors)
        axes.invert_yaxis()
    latency.set(xlabel="latency of one chunk alone, ms")
    throughput.set(xlabel="chunks a second, many at once")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True, has_budget=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="1 round of few chunks")
    parser.add_argument("--executors", nargs="+", default=["inline", "multiprocess", "ray"])
    options = parser.parse_args()
    console = Console()
    work, rounds = (Work(10, 32), 1) if options.quick else (Work(100, 256), options.rounds)
    console.print(command(), machine())
    with ray_cluster(console, "ray" in options.executors) as address:
        cases = [Case(executor, replicas) for replicas in (1, 2) for executor in ("inline", "multiprocess")]
        cases = [case for case in cases if case.executor in options.executors]
        if address is not None:
            cases += [Case("ray", 1), Case("ray", 2)]
        figures = measure(
            cases, work, rounds, address or "auto", options.json, Budget(options.budget_s, console)
        )
    show(figures, console)
    if options.plot:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
