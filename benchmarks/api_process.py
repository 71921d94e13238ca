"""What the API process takes for a request, and how many it can take: its engine answers at once.

    python -m benchmarks.api_process        clips of 5 and 30 s, and files of 14 to 22 minutes

The server runs as always, with a process for its replica, but no model runs there: each chunk gets a hundred
random tokens. What is left is HTTP, forms, decoding audio, splitting, transport, text and events. The event
loop's processor time for a request bounds how many a second one API process can take.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.client import Client, connected, transcribe
from benchmarks.health import HealthProbe, probing_health
from benchmarks.reporting import (
    Budget,
    benchmark_parser,
    command,
    machine,
    quantile,
    spread,
    write_json,
)
from benchmarks.running_server import running_server
from benchmarks.uploads import LONG_MINUTES, Upload, long_uploads, short_uploads
from harness.checkpoints import add_checkpoints_option, fixed_checkpoint

MODULE = "benchmarks.instant_replica"
FLAGS = ("--max-upload-bytes", str(64 << 20), "--no-check-voice")  # what random tokens say is always in doubt
FIELDS = {"language": "en"}


class ThreadTimes(NamedTuple):
    """Processor seconds of the API process."""

    event_loop: float
    others: float


class Round(NamedTuple):
    wall_s: float
    cpu: ThreadTimes
    health_s: list[float]


@dataclass(eq=False)
class Case:
    name: str
    uploads: list[Upload]
    in_flight: int
    rounds: list[Round] = field(default_factory=list)

    @property
    def audio_s(self) -> float:
        return sum(upload.duration_s for upload in self.uploads)

    def requests_per_s(self) -> list[float]:
        return [len(self.uploads) / each.wall_s for each in self.rounds]

    def rtfx(self) -> list[float]:
        return [self.audio_s / each.wall_s for each in self.rounds]

    def event_loop_ms(self) -> list[float]:
        """How much processor time the event loop took for one request, in each round."""
        return [1000 * each.cpu.event_loop / len(self.uploads) for each in self.rounds]

    def others_ms(self) -> list[float]:
        return [1000 * each.cpu.others / len(self.uploads) for each in self.rounds]

    def health_ms(self) -> list[float]:
        return [1000 * latency_s for each in self.rounds for latency_s in each.health_s]


def cases(quick: bool) -> list[Case]:
    num_clips, minutes = (40, (1.0, 1.5)) if quick else (1000, LONG_MINUTES)
    return [
        Case("5 s, wav", short_uploads(num_clips, ["wav"], 5.0), 64),
        Case("30 s, wav", short_uploads(num_clips // 2, ["wav"], 30.0), 64),
        Case("30 s, mp3", short_uploads(num_clips // 4, ["mp3"], 30.0), 64),
        Case(
            f"{min(minutes):g} to {max(minutes):g} minutes, wav, flac, mp3",
            long_uploads(["wav", "flac", "mp3"], 6, minutes),
            6,
        ),
    ]


async def measure(
    url: str, planned: Sequence[Case], num_rounds: int, budget: Budget, write: Callable[[], None]
) -> None:
    """Rounds in turns, after one that warms up. What there is, is written after each."""
    server = server_process()
    with probing_health(url) as health, Progress(console=Console(stderr=True)) as progress:
        async with connected(url) as client:
            for number in progress.track(range(num_rounds + 1), description="rounds"):
                for case in (case for case in planned if budget.allows(case.name)):
                    measured = await one_round(client, server, case, health)
                    if number:
                        case.rounds.append(measured)
                        write()


async def one_round(client: Client, server: psutil.Process, case: Case, health: HealthProbe) -> Round:
    places = asyncio.Semaphore(case.in_flight)

    async def one(upload: Upload) -> None:
        async with places:
            await transcribe(client, upload.name, upload.data, FIELDS)

    before, started = thread_times(server), time.perf_counter()
    await asyncio.gather(*map(one, case.uploads))
    wall_s, after = time.perf_counter() - started, thread_times(server)
    cpu = ThreadTimes(after.event_loop - before.event_loop, after.others - before.others)
    return Round(wall_s, cpu, health.latencies_since(started))


def thread_times(process: psutil.Process) -> ThreadTimes:
    """The event loop runs in the thread that has the process's number."""
    times: Mapping[int, float] = {
        thread.id: thread.user_time + thread.system_time for thread in process.threads()
    }
    return ThreadTimes(times[process.pid], sum(times.values()) - times[process.pid])


def server_process() -> psutil.Process:
    """The one that this process has started."""
    children = psutil.Process().children()
    return next(child for child in children if {MODULE, "serve"} <= set(child.cmdline()))


def show(measured: Sequence[Case], console: Console) -> None:
    table = Table(
        "files", "at once", "requests/s", "RTFx", "event loop, ms a request", "its other threads, ms",
        "/health p50 / p99 / max, ms",
    )  # fmt: skip
    for case in measured:
        health_ms = case.health_ms()
        table.add_row(
            case.name,
            str(case.in_flight),
            spread(case.requests_per_s(), 1),
            spread(case.rtfx(), 0),
            spread(case.event_loop_ms()),
            spread(case.others_ms()),
            " / ".join(f"{quantile(health_ms, at):.1f}" for at in (0.5, 0.99, 1.0)),
        )
    console.print(table)


def figures(measured: Sequence[Case]) -> list[dict[str, Any]]:
    return [
        {
            "files": case.name,
            "num_requests": len(case.uploads),
            "audio_s": case.audio_s,
            "in_flight": case.in_flight,
            "requests_per_s": case.requests_per_s(),
            "rtfx": case.rtfx(),
            "event_loop_ms": case.event_loop_ms(),
            "other_threads_ms": case.others_ms(),
            "event_loop_busy": [each.cpu.event_loop / each.wall_s for each in case.rounds],
            "health_ms": {
                name: quantile(case.health_ms(), at)
                for name, at in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
            "median_requests_per_s": statistics.median(case.requests_per_s()),
        }
        for case in measured
    ]


def main() -> None:
    options = arguments()
    console = Console(width=160)
    console.print("command:", command())
    console.print("machine:", machine())
    model = str(fixed_checkpoint("pocket", options.checkpoints, "cpu"))
    console.print("making the files")
    planned, budget = cases(options.quick), Budget(options.budget_s, console)
    num_rounds = 1 if options.quick else options.rounds

    def measured() -> list[Case]:
        return [case for case in planned if case.rounds]

    def write() -> None:
        write_json(options.json, figures(measured()))

    with running_server(
        model, *FLAGS, "--preprocess-workers", str(options.preprocess_workers), module=MODULE
    ) as url:
        asyncio.run(measure(url, planned, num_rounds, budget, write))
    show(measured(), console)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preprocess-workers", type=int, default=2)
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="1 round of few and short files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
