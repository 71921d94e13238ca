"""The engine alone: arrays in, tokens out.

    python -m benchmarks.engine               whisper-tiny's shape, 1, 16 and 64 clips in flight
    python -m benchmarks.engine --shape small --in-flight 1 16 --dtype bfloat16 float32 --json engine.json
    python -m benchmarks.engine --shape large-v3-turbo --device cuda --in-flight 1 8 32 128 --tokens 100
    python -m benchmarks.engine --profile     where the time goes, and how far from the floors
    python -m benchmarks.engine --quick

Random weights of the shape asked for, end-of-text suppressed, a fixed number of tokens a clip. Every clip is
distinct, and made before the clock starts. Latency is from the submission of all clips to a clip's result;
throughput counts from the first submission to the last result.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.core import ChunkId, DecodingOptions, Result, Samples, Submit
from asr_server.engine import Engine, EngineConfig
from benchmarks.checkpoints import SHAPES, fix_length, make_checkpoint
from benchmarks.clips import make_clip
from benchmarks.floors import Floors, measure_floors
from benchmarks.reporting import command, machine, spread, write_json


@dataclass
class Case:
    """One setting and what was measured with it."""

    dtype: str
    in_flight: int
    clip_s: float
    tokens: int
    warm_up_s: float = 0.0
    wall_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)  # of every clip of every round
    decode_batch_mean: float = 0.0
    encode_share: float = 0.0  # of the wall time

    @property
    def rtfx(self) -> list[float]:
        return [self.in_flight * self.clip_s / wall for wall in self.wall_s]


def run_once(engine: Engine, clips: Sequence[Samples], tokens: int) -> tuple[float, list[float]]:
    """Seconds until the last result, and until each."""
    options = DecodingOptions(language="en", max_new_tokens=tokens)
    started = time.perf_counter()
    for i, clip in enumerate(clips):
        engine.handle(Submit(ChunkId(str(i), 0), clip, options))
    latencies: list[float] = []
    while engine.has_work:
        results = [event.result for event in engine.step() if isinstance(event, Result)]
        assert all(len(result.tokens) == tokens for result in results), "the work must be the same everywhere"
        latencies += [time.perf_counter() - started] * len(results)
    assert len(latencies) == len(clips)
    return latencies[-1], latencies


class Stopwatch:
    """Adds up the seconds spent in a method of an object."""

    def __init__(self, owner: Any, method: str) -> None:
        self.seconds = 0.0
        self._call: Callable[..., Any] = getattr(owner, method)
        setattr(owner, method, self._timed)

    def _timed(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


def measure(cases: list[Case], engines: dict[str, Engine], rounds: int, progress: Progress) -> None:
    """Warms every case up, then takes turns."""
    clips = [make_clip(i, case.clip_s) for case in cases[:1] for i in range(max(c.in_flight for c in cases))]
    watches = {dtype: Stopwatch(engine._runner, "encode") for dtype, engine in engines.items()}
    for case in cases:
        case.warm_up_s = run_once(engines[case.dtype], clips[: case.in_flight], case.tokens)[0]
    for _ in progress.track(range(rounds), description="rounds"):
        for case in cases:
            engine, watch = engines[case.dtype], watches[case.dtype]
            steps, decoded, encoding = engine.num_decode_steps, engine.num_decoded_tokens, watch.seconds
            wall_s, latencies = run_once(engine, clips[: case.in_flight], case.tokens)
            case.wall_s.append(wall_s)
            case.latency_s += latencies
            case.decode_batch_mean = (engine.num_decoded_tokens - decoded) / (engine.num_decode_steps - steps)
            case.encode_share = (watch.seconds - encoding) / wall_s


def show(cases: list[Case], console: Console) -> None:
    table = Table(
        "dtype", "in flight", "clip", "RTFx, median (range)", "latency mean / median / p95 / max, s",
        "warm-up, s", "decode batch", "encoding",
    )  # fmt: skip
    for case in cases:
        ordered = sorted(case.latency_s)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        figures = (statistics.mean(ordered), statistics.median(ordered), p95, ordered[-1])
        table.add_row(
            case.dtype,
            str(case.in_flight),
            f"{case.clip_s:g} s",
            spread(case.rtfx, 1),
            " / ".join(f"{figure:.2f}" for figure in figures),
            f"{case.warm_up_s:.2f}",
            f"{case.decode_batch_mean:.1f}",
            f"{case.encode_share:.0%}",
        )
    console.print(table)


def show_floors(case: Case, floors: Floors, engine: Engine, console: Console) -> dict[str, float]:
    """What the clips would take if only the matrix rate and the memory bandwidth counted."""
    sizes = engine.model.sizes
    encode_s = floors.encode_s(sizes)
    decode_s = floors.decode_step_s(sizes, case.in_flight, engine.model.dtype.itemsize)
    wall_s = statistics.median(case.wall_s)
    measured_encode_s = case.encode_share * wall_s / case.in_flight
    steps = case.in_flight * case.tokens / case.decode_batch_mean
    measured_decode_s = (1 - case.encode_share) * wall_s / steps
    console.print(
        f"matrix products {floors.gflops:.0f} GFLOP/s, memory {floors.gbytes:.1f} GB/s (measured now)\n"
        f"encoder: {measured_encode_s * 1e3:.1f} ms a clip, floor {encode_s * 1e3:.1f}\n"
        f"decode step: {measured_decode_s * 1e3:.2f} ms at a batch of {case.decode_batch_mean:.1f}, "
        f"floor {decode_s * 1e3:.2f}"
    )
    return {
        "gflops": floors.gflops,
        "gbytes_s": floors.gbytes,
        "encode_s": measured_encode_s,
        "encode_floor_s": encode_s,
        "decode_step_s": measured_decode_s,
        "decode_step_floor_s": decode_s,
    }


def show_profile(case: Case, engine: Engine, console: Console) -> None:
    """Where torch spends the time of one round."""
    from torch.profiler import ProfilerActivity, profile

    clips = [make_clip(i, case.clip_s) for i in range(case.in_flight)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_once(engine, clips, case.tokens)
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    table = Table("operation", "share", "ms", "calls")
    for row in rows[:12]:
        share = row.self_cpu_time_total / total
        table.add_row(row.key, f"{share:.1%}", f"{row.self_cpu_time_total / 1e3:.0f}", str(row.count))
    console.print(table)


def plot(cases: list[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for dtype in dict.fromkeys(case.dtype for case in cases):
        some = sorted((case for case in cases if case.dtype == dtype), key=lambda case: case.in_flight)
        medians = [statistics.median(case.rtfx) for case in some]
        below = [middle - min(case.rtfx) for middle, case in zip(medians, some, strict=True)]
        above = [max(case.rtfx) - middle for middle, case in zip(medians, some, strict=True)]
        axes.errorbar([case.in_flight for case in some], medians, [below, above], marker="o", label=dtype)
    axes.set(xlabel="clips in flight", ylabel="seconds of audio a second", ylim=(0, None), xscale="log")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument(
        "--in-flight", nargs="+", type=int, default=[1, 16, 64], help="clips submitted together"
    )
    parser.add_argument("--clip-s", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of every clip")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--encode-batch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "asr-server-benchmarks"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds and clips, to see that it works")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.in_flight, options.tokens = 2, [1, 4], 20
    console = Console(stderr=True, width=140)
    console.print(command(), machine())
    made = make_checkpoint(options.checkpoints / options.shape, SHAPES[options.shape])
    fixed = fix_length(made, options.checkpoints / f"{options.shape}-fixed")
    engines = {
        dtype: Engine(
            EngineConfig(
                str(fixed), options.device, dtype, options.slots, options.encode_batch, options.threads
            )
        )
        for dtype in options.dtype
    }
    cases = [
        Case(dtype, count, options.clip_s, options.tokens)
        for dtype in options.dtype
        for count in options.in_flight
    ]
    with Progress(console=console) as progress:
        measure(cases, engines, options.rounds, progress)
    show(cases, console)
    last = cases[-1]
    figures: dict[str, Any] = {"shape": options.shape, "cases": [asdict(case) for case in cases]}
    if engines[last.dtype].model.device.type == "cpu":
        floors = measure_floors(engines[last.dtype].model.dtype)
        figures["floors"] = show_floors(last, floors, engines[last.dtype], console)
    if options.profile:
        show_profile(last, engines[last.dtype], console)
    write_json(options.json, figures)
    if options.plot:
        plot(cases, options.plot)


if __name__ == "__main__":
    main()
