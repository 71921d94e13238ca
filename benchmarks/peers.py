"""The same checkpoint and the same clips through every system, in turns.

    python -m benchmarks.peers                          whisper-tiny's shape, 16 clips of 30 s
    python -m benchmarks.peers --shape small --clip-s 5 --rounds 5 --json peers.json --plot peers.png
    python -m benchmarks.peers --quick                  two rounds, fewer settings

Each peer first shows its best setting (compute type and batch size); the best ones then take turns with ours.
Every system runs in a process of its own with the same number of threads, gets arrays, gives tokens, and does
the same work: random weights, end-of-text suppressed, a fixed number of tokens a clip. A peer that is not
installed is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.core import Samples
from benchmarks.checkpoints import SHAPES, fix_length, make_checkpoint
from benchmarks.clips import make_clip
from benchmarks.reporting import command, machine, spread, write_json


@dataclass(frozen=True)
class Work:
    """What every system is given."""

    checkpoint: str
    converted: str  # the same for CTranslate2
    clips: int
    clip_s: float
    tokens: int
    threads: int


@dataclass(frozen=True)
class Setting:
    system: str  # a module of benchmarks.systems
    dtype: str
    batch: int

    def __str__(self) -> str:
        return f"{self.system} {self.dtype} batch {self.batch}"


class Runner:
    """A system in a process of its own, that runs the work once for every line it is sent."""

    def __init__(self, setting: Setting, work: Work) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(work.threads), "TRANSFORMERS_VERBOSITY": "error"}
        task = json.dumps({"setting": asdict(setting), "work": asdict(work)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems", task],
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


def candidates(quick: bool, clips: int) -> list[Setting]:
    """The peers' settings worth trying, none larger than the work."""
    batches = [size for size in ((8, 16) if quick else (1, 4, 8, 16)) if size <= clips] or [clips]
    faster = ("int8_float32",) if quick else ("int8_float32", "int8", "float32")
    settings = [
        *(Setting("faster_whisper", dtype, batch) for dtype in faster for batch in batches),
        *(Setting("transformers", dtype, batch) for dtype in ("float32", "bfloat16") for batch in batches),
    ]
    return [setting for setting in settings if find_spec(setting.system) is not None]


def choose(settings: Sequence[Setting], work: Work, repeats: int, progress: Progress) -> dict[Setting, float]:
    """The least seconds of each setting."""
    found = {}
    for setting in progress.track(settings, description="best settings of the peers"):
        with running(setting, work) as runner:
            runner.run()  # warm-up
            found[setting] = min(runner.run() for _ in range(repeats))
    return found


def take_turns(
    settings: Sequence[Setting], work: Work, rounds: int, progress: Progress
) -> dict[Setting, list[float]]:
    """Seconds of every round, the systems interleaved."""
    runners = {setting: Runner(setting, work) for setting in settings}
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    try:
        for runner in runners.values():
            runner.run()  # warm-up
        for _ in progress.track(range(rounds), description="rounds"):
            for setting, runner in runners.items():
                seconds[setting].append(runner.run())
    finally:
        for runner in runners.values():
            runner.close()
    return seconds


def prepare(shape: str, clips: int, clip_s: float, tokens: int, threads: int, directory: Path) -> Work:
    made = make_checkpoint(directory / shape, SHAPES[shape])
    fixed = fix_length(made, directory / f"{shape}-fixed")
    converted = directory / f"{shape}-ct2"
    if not converted.exists() and find_spec("ctranslate2") is not None:
        _convert(made, converted)
    return Work(str(fixed), str(converted), clips, clip_s, tokens, threads)


def _convert(checkpoint: Path, target: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    files = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(str(checkpoint), copy_files=files).convert(str(target))


def make_clips(work: Work) -> list[Samples]:
    clips = [make_clip(i, work.clip_s) for i in range(work.clips)]
    assert len({hashlib.sha256(clip.tobytes()).digest() for clip in clips}) == work.clips, "clips must differ"
    return clips


def show(work: Work, seconds: dict[Setting, list[float]], console: Console) -> None:
    table = Table("system", "s, median (range)", "RTFx", "its time / ours, round by round")
    ours = next(times for setting, times in seconds.items() if setting.system == "ours")
    for setting, times in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(times, ours, strict=True)]
        rtfx = work.clips * work.clip_s / statistics.median(times)
        table.add_row(str(setting), spread(times), f"{rtfx:.1f}", spread(ratios))
    console.print(
        f"{work.clips} clips of {work.clip_s:g} s, {work.tokens} tokens each, {work.threads} threads"
    )
    console.print(table)


def plot(work: Work, seconds: dict[Setting, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 1 + 0.5 * len(seconds)), layout="constrained")
    rates = {
        str(setting): [work.clips * work.clip_s / s for s in times] for setting, times in seconds.items()
    }
    names = list(rates)
    medians = [statistics.median(rates[name]) for name in names]
    below = [middle - min(rates[name]) for name, middle in zip(names, medians, strict=True)]
    above = [max(rates[name]) - middle for name, middle in zip(names, medians, strict=True)]
    axes.barh(names, medians, xerr=[below, above], color=["#2a6f97", *["#a9b4c2"] * (len(names) - 1)])
    axes.set_xlabel("seconds of audio a second (median, with range)")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--clips", type=int, default=16, help="distinct clips in flight at once")
    parser.add_argument("--clip-s", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of every clip")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", nargs="+", default=["auto"], help="ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs="+", help="settings as system:dtype:batch, instead of a search")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "asr-server-benchmarks"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    console = Console(stderr=True, width=120)
    console.print(command(), machine())
    work = prepare(
        options.shape, options.clips, options.clip_s, options.tokens, options.threads, options.checkpoints
    )
    with Progress(console=console) as progress:
        searched = {}
        if options.peers:
            best = [Setting(s, d, int(b)) for s, d, b in (peer.split(":") for peer in options.peers)]
        else:
            searched = choose(
                candidates(options.quick, options.clips), work, 1 if options.quick else 2, progress
            )
            best = [_best_of(searched, system) for system in dict.fromkeys(each.system for each in searched)]
        ours = [Setting("ours", dtype, options.clips) for dtype in options.dtype]
        seconds = take_turns([*ours, *best], work, 2 if options.quick else options.rounds, progress)
    show(work, seconds, console)
    figures: dict[str, Any] = {
        "work": asdict(work) | {"checkpoint": options.shape, "converted": None},
        "searched_s": {str(setting): round(least, 3) for setting, least in searched.items()},
        "rounds_s": {str(setting): [round(s, 3) for s in times] for setting, times in seconds.items()},
    }
    write_json(options.json, figures)
    if options.plot:
        plot(work, seconds, options.plot)


def _best_of(searched: dict[Setting, float], system: str) -> Setting:
    return min(
        (setting for setting in searched if setting.system == system), key=lambda setting: searched[setting]
    )


if __name__ == "__main__":
    main()
