"""The audio front end against other ways of turning a file into 16 kHz mono.

    python -m benchmarks.frontend [--quick] [--json FILE] [--plot FILE]

Speed of one core (audio seconds per second of processor time, decode processes included) and peak memory. All
ways take turns in every round, so that a noisy machine disturbs them alike; figures are medians over the
rounds, with the range beside them. `benchmarks.serving --preprocess-workers` measures more threads.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.reporting import command, machine, write_json

from .memory import memory
from .one_core import one_core
from .recordings import FORMATS, write
from .report import plot, show
from .ways import WAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="shorter files: to see that it runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of each recording")
    parser.add_argument("--parts", default="one_core,memory", help="what to measure")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="write a plot there")
    arguments = parser.parse_args()
    duration_s = 60.0 if arguments.quick else arguments.duration
    console = Console(width=180)
    console.print(command(), machine())
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        results = measure(Path(folder), duration_s, arguments.rounds, arguments.parts.split(","), progress)
    write_json(arguments.json, results | {"duration_s": duration_s})
    show(results, console)
    if arguments.plot:
        plot(results, arguments.plot)


def measure(
    folder: Path, duration_s: float, rounds: int, parts: list[str], progress: Progress
) -> dict[str, Any]:
    steps = len(FORMATS) * (1 + rounds * len(WAYS)) + len(WAYS)
    task = progress.add_task("writing, then measuring", total=steps)

    def tick() -> None:
        progress.advance(task)

    paths = {}
    for number, name in enumerate(FORMATS):
        paths[name] = folder / str(number)
        write(paths[name], name, duration_s)
        tick()
    write(folder / "short", "mp3 44.1k stereo", 30.0)
    long_s = 6 * duration_s
    write(folder / "long", "mp3 44.1k stereo", long_s)
    return {
        "one_core": one_core(paths, rounds, duration_s, tick) if "one_core" in parts else {},
        "memory_mb": memory(folder / "long", tick) if "memory" in parts else {},
        "memory_s": long_s,
    }


if __name__ == "__main__":
    main()
