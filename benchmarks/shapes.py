"""A checkpoint of random weights of any shape, and the same clips, through ours and transformers in turns.

    python -m benchmarks.shapes                          whisper-tiny's shape, 16 clips of 30 s
    python -m benchmarks.shapes --shape small --clip-s 5 --rounds 5 --json peers.json --plot peers.png
    python -m benchmarks.shapes --quick                  two rounds, fewer settings

    python -m benchmarks.shapes --device cuda --shape large-v3-turbo --clips 128 --tokens 100

transformers first shows its best setting (precision and batch size), which then takes turns with ours.
Every system runs in a process of its own with the same number of threads, gets arrays, gives tokens, and does
the same work: random weights, end-of-text suppressed, a fixed number of tokens a clip. Ours takes part a
second time as the whole server, over HTTP on loopback. Where transformers is not installed it is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.core import Samples
from benchmarks.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from benchmarks.clips import make_clip
from benchmarks.reporting import (
    Budget,
    benchmark_parser,
    command,
    error_bars,
    machine,
    pyplot,
    spread,
    write_json,
)

OURS = {"arrays": "ours", "http": "ours_http"}
LABELS = {"ours": "ours, arrays in,", "ours_http": "ours over HTTP,"}
BATCHES = {"cpu": (1, 4, 8, 16), "cuda": (8, 32, 64, 128)}


@dataclass(frozen=True)
class Work:
    """What every system is given."""

    checkpoint: str
    clips: int
    clip_s: float
    tokens: int
    threads: int
    device: str

    @property
    def slots(self) -> int:
        """How many ours has; 0: the engine chooses. On CUDA, where all share the memory, one a clip."""
        return self.clips if self.device == "cuda" else 0


@dataclass(frozen=True)
class Setting:
    system: str  # a module of benchmarks.shape_systems
    dtype: str
    batch: int

    def __str__(self) -> str:
        if self.system in OURS.values():
            return f"{LABELS[self.system]} {self.dtype}"
        return f"{self.system}, arrays in, {self.dtype} batch {self.batch}"


class Runner:
    """A system in a process of its own, that runs the work once for every line it is sent."""

    def __init__(self, setting: Setting, work: Work) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(work.threads), "TRANSFORMERS_VERBOSITY": "error"}
        task = json.dumps({"setting": asdict(setting), "work": asdict(work)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.shape_systems", task],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
            text=True,
            env=environment,
        )

    def run(self) -> float:
        """Seconds from the first clip's arrival to the last token; loading is not counted."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the system ended with status {self._process.wait()}")
        return float(json.loads(line)["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextmanager
def running(setting: Setting, work: Work) -> Iterator[Runner]:
    runner = Runner(setting, work)
    try:
        yield runner
    finally:
        runner.close()


def candidates(quick: bool, work: Work) -> list[Setting]:
    """transformers' settings worth trying, none larger than the work."""
    if find_spec("transformers") is None:
        return []
    batches = [size for size in BATCHES[work.device][-2 if quick else 0 :] if size <= work.clips]
    dtypes = ["bfloat16"] if work.device == "cuda" else ["float32", "bfloat16"]
    return [Setting("transformers", dtype, batch) for dtype in dtypes for batch in batches or [work.clips]]


def choose(
    settings: Sequence[Setting], work: Work, repeats: int, budget: Budget, progress: Progress
) -> dict[Setting, float]:
    """Return the least seconds of each setting."""
    found = {}
    for setting in progress.track(settings, description="the best setting of transformers"):
        if not budget.allows(setting):
            continue
        with running(setting, work) as runner:
            runner.run()  # warm-up
            found[setting] = min(runner.run() for _ in range(repeats))
    return found


def take_turns(
    settings: Sequence[Setting],
    work: Work,
    rounds: int,
    budget: Budget,
    progress: Progress,
    write: Callable[[dict[Setting, list[float]]], None],
) -> dict[Setting, list[float]]:
    """Seconds of every round, the systems interleaved. What there is, is written after each round."""
    runners = {setting: Runner(setting, work) for setting in settings}
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    try:
        round_s = sum(runner.run() for runner in runners.values())  # warm-up
        for i in progress.track(range(rounds), description="rounds"):
            if i == 0 or budget.allows(f"round {i + 1}", round_s):
                for setting, runner in runners.items():
                    seconds[setting].append(runner.run())
                write(seconds)
    finally:
        for runner in runners.values():
            runner.close()
    return seconds


def prepare(options: argparse.Namespace) -> Work:
    fixed = fixed_checkpoint(options.shape, options.checkpoints, options.device)
    return Work(
        str(fixed),
        options.clips,
        options.clip_s,
        options.tokens,
        options.threads,
        options.device,
    )


def make_clips(work: Work) -> list[Samples]:
    clips = [make_clip(i, work.clip_s) for i in range(work.clips)]
    assert len({hashlib.sha256(clip.tobytes()).digest() for clip in clips}) == work.clips, "clips must differ"
    return clips


def show(work: Work, seconds: dict[Setting, list[float]], console: Console) -> None:
    table = Table("system", "s, median (range)", "RTFx")
    bases = [setting for setting in seconds if setting.system in OURS.values()]
    for base in bases:
        table.add_column(f"its time / {base}, round by round")
    for setting, times in seconds.items():
        rtfx = work.clips * work.clip_s / statistics.median(times)
        ratios = [
            [theirs / mine for theirs, mine in zip(times, seconds[base], strict=True)] for base in bases
        ]
        table.add_row(str(setting), spread(times), f"{rtfx:.1f}", *map(spread, ratios))
    where = work.device if work.device == "cuda" else f"{work.threads} threads"
    console.print(f"{work.clips} clips of {work.clip_s:g} s, {work.tokens} tokens each, {where}")
    console.print(table)


def plot(work: Work, seconds: dict[Setting, list[float]], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 1 + 0.5 * len(seconds)), layout="constrained")
    medians, bars = error_bars([[work.clips * work.clip_s / s for s in times] for times in seconds.values()])
    colours = ["#2a6f97" if setting.system in OURS.values() else "#a9b4c2" for setting in seconds]
    axes.barh([str(setting) for setting in seconds], medians, xerr=bars, color=colours)
    axes.set_xlabel("seconds of audio a second (median, with range)")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True, has_budget=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--clips", type=int, default=16, help="distinct clips in flight at once")
    parser.add_argument("--clip-s", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of every clip")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="ours")
    parser.add_argument(
        "--ours", nargs="+", choices=list(OURS), default=list(OURS), help="the engine, the whole server"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", help="settings as system:dtype:batch, instead of a search")
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="two rounds, fewer settings")
    options = parser.parse_args()
    console = Console(stderr=True, width=120)
    console.print(command(), machine())
    work, budget = prepare(options), Budget(options.budget_s, console)
    with Progress(console=console) as progress:
        searched = {}
        if options.peers:
            best = [Setting(s, d, int(b)) for s, d, b in (peer.split(":") for peer in options.peers)]
        else:
            tried, repeats = candidates(options.quick, work), 1 if options.quick else 2
            searched = choose(tried, work, repeats, budget, progress)
            best = [min(searched, key=lambda setting: searched[setting])] if searched else []
        ours = [Setting(OURS[way], dtype, options.clips) for way in options.ours for dtype in options.dtype]
        rounds = 2 if options.quick else options.rounds

        def write(seconds: dict[Setting, list[float]]) -> None:
            figures: dict[str, Any] = {
                "work": asdict(work) | {"checkpoint": options.shape},
                "searched_s": {str(setting): round(least, 3) for setting, least in searched.items()},
                "rounds_s": {
                    str(setting): [round(s, 3) for s in times] for setting, times in seconds.items()
                },
            }
            write_json(options.json, figures)

        seconds = take_turns([*ours, *best], work, rounds, budget, progress, write)
    show(work, seconds, console)
    if options.plot:
        plot(work, seconds, options.plot)


if __name__ == "__main__":
    main()
