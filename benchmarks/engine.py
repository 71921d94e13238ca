"""The engine alone: arrays in, tokens out.

    python -m benchmarks.engine               whisper-tiny's shape, 1, 16 and 64 clips in flight
    python -m benchmarks.engine --shape small --in-flight 1 16 --dtype bfloat16 float32 --json engine.json
    python -m benchmarks.engine --compute-workers 1 2 --copy-overlap off on
    python -m benchmarks.engine --shape large-v3-turbo --device cuda --tokens 100 60 150 \\
        --in-flight 128 1 8 32 512 --clip-s 30 10 5 --one-at-a-time
    python -m benchmarks.engine --short-audio exact tail --clip-s 5 --in-flight 16
    python -m benchmarks.engine --in-flight 512 --slots 128 --beam-size 1 5     steady, greedy and as served
    python -m benchmarks.engine --profile     where the time goes
    python -m benchmarks.engine --quick

Flags that take several values: every combination is measured, or with --one-at-a-time the first values of
all and each other value with the first ones of the rest. Random weights of the shape asked for, end-of-text
suppressed, a fixed number of tokens a clip. Every clip is distinct, and made before the clock starts. Latency
is from the submission of all clips to a clip's result; throughput counts from the first submission to the
last result.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from asr_server.core import ChunkId, DecodingOptions, Samples
from asr_server.engine import Engine, EngineConfig
from asr_server.engine.config import choose_device
from asr_server.transport.messages import Result, Submit
from benchmarks.engine_report import Case, Setup, figures, show, show_profile
from benchmarks.gpu_busy import GpuBusy
from benchmarks.reporting import Budget, benchmark_parser, command, grid, machine, write_json
from harness.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from harness.clips import make_clip


def run_once(
    engine: Engine, clips: Sequence[Samples], tokens: int, word_times: bool = False
) -> tuple[float, list[float]]:
    """Seconds until the last result, and until each."""
    options = DecodingOptions(language="en", max_new_tokens=tokens, word_timestamps=word_times)
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


class Bench:
    """An engine, and a watch on its encoder: on CUDA, which the host does not wait for, on launching it."""

    def __init__(self, setup: Setup, options: argparse.Namespace) -> None:
        device = choose_device(options.device).type
        self.engine = Engine.load(
            EngineConfig(
                str(fixed_checkpoint(setup.shape, options.checkpoints, device)),
                options.device,
                setup.dtype,
                options.slots,
                beam_size=setup.beam_size,
                encode_batch=setup.encode_batch,
                cpu_threads=options.threads,
                compute_workers=setup.compute_workers,
                copy_overlap=setup.copy_overlap,
                cuda_graphs=options.cuda_graphs,
                short_audio=setup.short_audio,
                kernels=setup.kernels,
            )
        )
        self._encoding = Stopwatch(self.engine._runner, "encode")

    def warm_up(self, case: Case) -> None:
        case.warm_up_s = run_once(self.engine, clips_of(case), case.tokens, case.word_times)[0]

    def round(self, case: Case, busy: GpuBusy) -> None:
        engine, clips = self.engine, clips_of(case)
        before, encoding = engine.heartbeat(), self._encoding.seconds
        started = time.perf_counter()
        wall_s, latencies = run_once(engine, clips, case.tokens, case.word_times)
        case.wall_s.append(wall_s)
        case.latency_s += latencies
        after = engine.heartbeat()
        num_steps = after.num_decode_steps - before.num_decode_steps
        case.decode_batch_mean = (after.num_decoded_tokens - before.num_decoded_tokens) / num_steps
        case.encode_share = (self._encoding.seconds - encoding) / wall_s
        if (share := busy.share_since(started)) is not None:
            case.gpu_busy.append(share)


@cache
def _clip(index: int, duration_s: float) -> Samples:
    return make_clip(index, duration_s)


def clips_of(case: Case) -> list[Samples]:
    return [_clip(i, case.clip_s) for i in range(case.in_flight)]


def plan(options: argparse.Namespace) -> list[Case]:
    """Every shape in full; what needs another engine changes slowest."""
    axes = [
        options.shape,
        options.dtype,
        options.compute_workers,
        [each == "on" for each in options.copy_overlap],
        options.short_audio,
        options.kernels,
        options.beam_size,
        options.encode_batch,
        options.tokens,
        options.clip_s,
        options.in_flight,
        [each == "on" for each in options.word_times],
    ]
    points = grid(axes, options.one_at_a_time, num_full=1)
    return [Case(Setup(*point[:8]), *point[8:]) for point in points]


def measure(cases: list[Case], options: argparse.Namespace, budget: Budget, progress: Progress) -> None:
    """On CPU all engines take turns, so that a noisy machine disturbs them alike. On a GPU, whose memory one
    engine's slots may fill, one comes after another."""
    setups = list(dict.fromkeys(case.setup for case in cases))
    one_by_one = choose_device(options.device).type == "cuda"
    task = progress.add_task("rounds", total=options.rounds * len(cases))
    busy = GpuBusy()
    for together in [[setup] for setup in setups] if one_by_one else [setups]:
        own = [case for case in cases if case.setup in together]
        if not budget.allows(", ".join(map(str, together))):
            continue
        progress.console.print("measuring", ", ".join(map(str, together)))
        with benches_of(together, options) as benches:
            for case in own:
                case.describe(benches[case.setup].engine)
                benches[case.setup].warm_up(case)
            for case in (case for _ in range(options.rounds) for case in own):
                if budget.allows(f"a round of {case}", case.warm_up_s):
                    benches[case.setup].round(case, busy)
                progress.advance(task)
            if options.profile:
                first = own[0]  # the load: a clip alone has other kernels and waits
                profiled = partial(run_once, benches[first.setup].engine, clips_of(first), first.tokens)
                show_profile(profiled, progress.console)
        # After each engine: whatever ends the run early, what was measured is there.
        write_json(options.json, figures([case for case in cases if case.wall_s]))


@contextmanager
def benches_of(setups: Sequence[Setup], options: argparse.Namespace) -> Iterator[dict[Setup, Bench]]:
    benches = {setup: Bench(setup, options) for setup in setups}
    try:
        yield benches
    finally:
        while benches:  # no variable may hold the last one: on a GPU its slots would starve the next
            benches.popitem()[1].engine.close()
        gc.collect()  # an engine and its stopwatch hold each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    options = arguments()
    console = Console(stderr=True, width=160)
    console.print(command(), machine())
    cases = plan(options)
    with Progress(console=console) as progress:
        measure(cases, options, Budget(options.budget_s, console), progress)
    measured = [case for case in cases if case.wall_s]
    show(measured, console)
    write_json(options.json, figures(measured))


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["tiny"])
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", nargs="+", default=["auto"])
    parser.add_argument(
        "--in-flight", nargs="+", type=int, default=[1, 16, 64], help="clips submitted together"
    )
    parser.add_argument("--clip-s", nargs="+", type=float, default=[30.0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[60], help="tokens of every clip")
    parser.add_argument("--compute-workers", nargs="+", type=int, default=[0], help="0: by device")
    parser.add_argument("--copy-overlap", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--short-audio", nargs="+", choices=("exact", "tail"), default=["exact"])
    parser.add_argument("--kernels", nargs="+", choices=("auto", "torch"), default=["auto"])
    parser.add_argument("--one-at-a-time", action="store_true", help="not every combination")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--encode-batch", nargs="+", type=int, default=[0], help="0: by device")
    parser.add_argument("--beam-size", nargs="+", type=int, default=[1], help="1: greedy; a server's is 5")
    parser.add_argument("--word-times", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="a round of few clips, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.in_flight, options.tokens = 1, [2, 1], [10]
    return options


if __name__ == "__main__":
    main()
