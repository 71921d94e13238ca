"""Time and memory of bringing arrays from one process to another.

    python -m benchmarks.transport        32 arrays of 16 MB in four layouts, two ways; chunks; round trips

The table is that of vLLM's tensor transport (pull request 16432): so many messages with so many arrays
each, and always the same payload. Memory is the peak of both processes together (PSS: pages that they share
count once), above what they had when the sender held the payload already. The receiver touches every page
and drops each message before the next. Time and memory are measured in separate runs, because looking at
memory takes time; rounds are interleaved.
"""

from __future__ import annotations

import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.reporting import (
    Budget,
    benchmark_parser,
    command,
    machine,
    pyplot,
    quantile,
    spread,
    write_json,
)
from benchmarks.transport_variants import (
    SPAWN,
    VARIANTS,
    Endpoint,
    make_endpoint,
    make_receiver,
    make_sender,
    remove,
)

MB = 1_000_000
CHUNK_BYTES = 1_920_000  # 30 s of float32 at 16 kHz
PAGE = 4096
SAMPLE_S = 0.002


class Work(NamedTuple):
    """What is sent: `num_messages` of `num_arrays` each, evenly at `rate` a second (0: at once)."""

    name: str
    num_messages: int
    num_arrays: int
    array_bytes: int
    rate: float = 0.0
    num_distinct: int = 0  # arrays that the sender holds and sends again; 0: each is sent once

    @property
    def payload_bytes(self) -> int:
        return (self.num_distinct or self.num_messages * self.num_arrays) * self.array_bytes


class Outcome(NamedTuple):
    seconds: float
    sender_cpu_s: float


def run_sender(variant: str, work: Work, endpoint: Endpoint, control: Connection) -> None:
    num_arrays = work.num_distinct or work.num_messages * work.num_arrays
    held = [np.full(work.array_bytes, number % 251, np.uint8) for number in range(num_arrays)]
    sender, shared_fd = make_sender(variant, endpoint)
    control.send(shared_fd)
    control.recv()
    started, cpu = time.perf_counter(), time.thread_time()
    for message in range(work.num_messages):
        if work.rate:
            time.sleep(max(0.0, started + message / work.rate - time.perf_counter()))
        first = message * work.num_arrays
        sender.send([held[(first + i) % num_arrays] for i in range(work.num_arrays)])
    control.send((started, time.thread_time() - cpu))
    control.recv()  # until the receiver has everything: frames that are not copied are read from here


def run_receiver(variant: str, work: Work, endpoint: Endpoint, sender_pid: int, control: Connection) -> None:
    receiver = make_receiver(variant, endpoint, sender_pid)
    control.send("ready")
    for _ in range(work.num_messages):
        arrays = receiver.receive()
        assert sum(int(array[::PAGE].sum(dtype=np.int64)) for array in arrays) >= 0
        del arrays
        receiver.dropped()
    control.send(time.perf_counter())
    control.recv()


class PeakPss:
    """The most memory that some processes have together, looked at every few milliseconds."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.baseline = self.peak = self._now()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        return sum(_pss(pid) for pid in self._pids)

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self.peak - self.baseline


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def run_case(variant: str, work: Work, watch_memory: bool) -> tuple[Outcome, int]:
    """One case in two fresh processes; the bytes are 0 where memory is not watched."""
    endpoint = make_endpoint()
    (ours, theirs), (our_other, their_other) = SPAWN.Pipe(), SPAWN.Pipe()
    sender = SPAWN.Process(target=run_sender, args=(variant, work, endpoint, theirs))
    sender.start()
    endpoint = endpoint._replace(shared_fd=ours.recv())
    receiver = SPAWN.Process(target=run_receiver, args=(variant, work, endpoint, sender.pid, their_other))
    receiver.start()
    our_other.recv()
    assert sender.pid is not None
    assert receiver.pid is not None
    peak = PeakPss([sender.pid, receiver.pid]) if watch_memory else None
    ours.send("go")
    started, cpu_s = ours.recv()
    ended = our_other.recv()
    extra_bytes = peak.stop() if peak else 0
    for control, process in ((ours, sender), (our_other, receiver)):
        control.send("end")
        process.join()
    remove(endpoint)
    return Outcome(ended - started, cpu_s), extra_bytes


def run_ping(num_rounds: int) -> list[float]:
    """Round trips, in seconds, of a small command and its answer between the server's own ends."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=answer_pings, args=(theirs, num_rounds))
    import asyncio

    from msgspec.structs import replace

    from asr_server.channel.messages import Cancel
    from asr_server.channel.zeromq import ZmqEngineClient

    async def ping() -> list[float]:
        client = ZmqEngineClient()
        process.start()
        ours.send(replace(client.address, shared_fd=None))
        await client.receive()
        times_s = []
        for _ in range(num_rounds):
            started = time.perf_counter()
            client.send(Cancel("request"))
            await client.receive()
            times_s.append(time.perf_counter() - started)
        client.close()
        return times_s

    try:
        return asyncio.run(ping())
    finally:
        process.join()


def answer_pings(control: Connection, num_rounds: int) -> None:
    from asr_server.channel.messages import Credit
    from asr_server.channel.zeromq import ZmqEngineServer

    server = ZmqEngineServer(control.recv())
    server.send(Credit(1))
    num_answered = 0
    while num_answered < num_rounds:
        for _ in server.receive(wait_s=1.0):
            server.send(Credit(1))
            num_answered += 1
    server.close()


def cases(scale: int) -> list[Work]:
    array_bytes = 16 * MB // scale
    layouts = [(8, 4), (4, 8), (2, 16), (1, 32)]
    table = [Work(f"{m} x {n}", m, n, array_bytes) for m, n in layouts]
    return [*table, Work("chunks, 133 a second", 400 // scale, 1, CHUNK_BYTES, rate=133.0, num_distinct=16)]


def measure(works: list[Work], rounds: int, path: Path | None, budget: Budget) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("cases", total=len(works) * len(VARIANTS) * (rounds + 1))
        for work in (work for work in works if budget.allows(work.name)):
            for number in range(rounds + 1):
                for variant in VARIANTS:
                    outcome, extra_bytes = run_case(variant, work, watch_memory=number == rounds)
                    own = figures.setdefault(work.name, {}).setdefault(variant, {"s": [], "sender_cpu_s": []})
                    if number == rounds:
                        own["payloads"] = extra_bytes / work.payload_bytes
                        own["extra_mb"] = extra_bytes / MB
                    else:
                        own["s"].append(outcome.seconds)
                        own["sender_cpu_s"].append(outcome.sender_cpu_s / work.num_messages)
                    progress.advance(bar)
            write_json(path, figures)
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    for name, variants in figures.items():
        table = Table("way", "s", "extra MB", "of the payload", "sender's CPU a message, ms", title=name)
        for variant, own in variants.items():
            cpu_ms = 1000 * statistics.median(own["sender_cpu_s"])
            row = (spread(own["s"]), f"{own['extra_mb']:.0f}", f"{own['payloads']:.2f}", f"{cpu_ms:.2f}")
            table.add_row(variant, *row)
        console.print(table)


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True, has_budget=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round, an eighth of the payload")
    options = parser.parse_args()
    console = Console()
    rounds = 1 if options.quick else options.rounds
    budget = Budget(options.budget_s, console)
    figures = measure(cases(8 if options.quick else 1), rounds, options.json, budget)
    trips_s = run_ping(200 if options.quick else 2000)
    console.print(command(), machine())
    show(figures, console)
    median_ms, p99_ms = 1000 * statistics.median(trips_s), 1000 * quantile(trips_s, 0.99)
    console.print(f"round trip of a small message: median {median_ms:.3f} ms, p99 {p99_ms:.3f} ms")
    write_json(options.json, figures | {"round_trip_ms": {"median": median_ms, "p99": p99_ms}})
    if options.plot:
        plot(figures, options.plot)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Extra memory and time of each way, layout by layout."""
    layouts = [name for name in figures if " x " in name]
    figure, (memory, seconds) = pyplot().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for variant in VARIANTS:
        memory.plot(layouts, [figures[name][variant]["payloads"] for name in layouts], "o-", label=variant)
        medians = [statistics.median(figures[name][variant]["s"]) for name in layouts]
        seconds.plot(layouts, medians, "o-")
    memory.set(xlabel="messages x arrays", ylabel="extra memory, in payloads", ylim=(0, None))
    seconds.set(xlabel="messages x arrays", ylabel="seconds", ylim=(0, None))
    memory.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
