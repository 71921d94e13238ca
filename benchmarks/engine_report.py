"""What `benchmarks.engine` measures, as a table and as JSON."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from asr_server.engine import Engine
from benchmarks.reporting import quantile, spread


@dataclass(frozen=True)
class Setup:
    """What needs an engine of its own."""

    shape: str
    dtype: str
    compute_workers: int
    copy_overlap: bool
    short_audio: str = "exact"
    kernels: str = "auto"
    beam_size: int = 1
    encode_batch: int = 0

    def __str__(self) -> str:
        workers = f", {self.compute_workers} workers" if self.compute_workers else ""
        overlap = ", copy overlap" if self.copy_overlap else ""
        short = ", short audio tail" if self.short_audio == "tail" else ""
        kernels = "" if self.kernels == "auto" else f", {self.kernels} kernels"
        batch = f", encode batch {self.encode_batch}" if self.encode_batch else ""
        return f"{self.shape} {self.dtype}, beam {self.beam_size}{workers}{overlap}{short}{kernels}{batch}"


@dataclass
class Case:
    """One setting and what was measured with it."""

    setup: Setup
    tokens: int
    clip_s: float
    in_flight: int
    word_times: bool = False
    dtype: str = ""
    num_slots: int = 0
    kernels: str = ""  # which were taken, with the times of both where they were tried
    warm_up_s: float = 0.0
    wall_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)  # of every clip of every round
    gpu_busy: list[float] = field(default_factory=list)  # share of the time, by round
    decode_batch_mean: float = 0.0
    encode_share: float = 0.0  # of the wall time, on the host

    def __str__(self) -> str:
        times = ", word times" if self.word_times else ""
        return f"{self.setup}, {self.in_flight} x {self.clip_s:g} s, {self.tokens} tokens{times}"

    def describe(self, engine: Engine) -> None:
        self.dtype, self.num_slots = engine.config.dtype, engine.num_slots
        self.kernels = engine.kernels_report

    @property
    def rtfx(self) -> list[float]:
        return [self.in_flight * self.clip_s / wall for wall in self.wall_s]


def show(cases: Sequence[Case], console: Console) -> None:
    table = Table(
        "engine", "in flight", "clip", "tokens", "RTFx, median (range)",
        "latency mean / median / p95 / max, s", "warm-up, s", "decode batch", "encoding", "GPU busy",
    )  # fmt: skip
    for case in cases:
        latencies = (
            statistics.mean(case.latency_s), statistics.median(case.latency_s),
            quantile(case.latency_s, 0.95), max(case.latency_s),
        )  # fmt: skip
        table.add_row(
            f"{case.setup}{', word times' if case.word_times else ''}",
            str(case.in_flight),
            f"{case.clip_s:g} s",
            str(case.tokens),
            spread(case.rtfx, 1),
            " / ".join(f"{latency:.2f}" for latency in latencies),
            f"{case.warm_up_s:.2f}",
            f"{case.decode_batch_mean:.1f}",
            f"{case.encode_share:.0%}",
            f"{statistics.mean(case.gpu_busy):.0%}" if case.gpu_busy else "",
        )
    console.print(table)
    console.print("random weights, a fixed number of tokens a clip, arrays in")
    for setup, report in {case.setup: case.kernels for case in cases if case.kernels}.items():
        console.print(f"kernels of {setup}: {report}")


def show_profile(run: Callable[[], object], console: Console) -> None:
    """Where torch spends the time of one round: by operation on CPU, by kernel on a GPU."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
    column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times_us = {row.key: (getattr(row, column), row.count) for row in profiler.key_averages()}
    total_us = sum(time_us for time_us, _ in times_us.values()) or 1.0
    table = Table("kernel" if on_gpu else "operation", "share", "ms", "calls")
    for name, (time_us, count) in sorted(times_us.items(), key=lambda item: -item[1][0])[:20]:
        table.add_row(name[:90], f"{time_us / total_us:.1%}", f"{time_us / 1e3:.1f}", str(count))
    console.print(table)


def figures(cases: Sequence[Case]) -> dict[str, Any]:
    return {"cases": [asdict(case) | {"rtfx": case.rtfx} for case in cases]}
