"""What every figure needs beside it: the machine, the command, the spread."""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

if TYPE_CHECKING:
    import torch

_TOLD_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


class Finding(NamedTuple):
    """What was checked, what came of it, and whether it is as it should be."""

    what: str
    found: str
    holds: bool


class Budget:
    """Seconds that a benchmark may take: when they are over, it leaves out what it has not begun."""

    def __init__(self, seconds: float, console: Console) -> None:
        self._seconds = seconds
        self._ends_at = time.monotonic() + seconds
        self.console = console

    def allows(self, what: object, expected_s: float = 0.0) -> bool:
        """Whether there is time left to begin something that is expected to take so long."""
        if time.monotonic() + expected_s <= self._ends_at:
            return True
        self.console.print(f"left out, for want of time (--budget-s {self._seconds:g}): {what}")
        return False


def benchmark_parser(description: str | None, has_budget: bool = False) -> argparse.ArgumentParser:
    """Describes a benchmark as its module does, and has the options that benchmarks share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    if has_budget:
        parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin nothing after that")
    return parser


def machine() -> dict[str, Any]:
    """The processor, how busy it was before we began, and what it reaches now, by a trial of a moment."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "gflop_s": {"float32": _gflop_s(torch.float32), "bfloat16": _gflop_s(torch.bfloat16)},
        "gb_s": _gb_s(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def command() -> str:
    """The command line, as someone else would type it."""
    return " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])


def grid(axes: Sequence[Sequence[Any]], one_at_a_time: bool, num_full: int = 0) -> list[tuple[Any, ...]]:
    """Every combination of the axes' values, the last changing fastest.

    Args:
        one_at_a_time: only those in which at most one axis has another value than its first.
        num_full: so many axes in front are combined with everything all the same.
    """
    points = itertools.product(*axes)
    if not one_at_a_time:
        return list(points)
    firsts = [axis[0] for axis in axes[num_full:]]
    return [p for p in points if sum(map(operator.ne, p[num_full:], firsts)) <= 1]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (least to most)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def write_json(path: Path | None, figures: Any) -> None:
    """In one piece: whatever ends the process meanwhile, what was there before stays readable."""
    if path is not None:
        report = {"command": command(), "machine": machine(), "figures": figures}
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        unfinished.replace(path)


def _gflop_s(dtype: torch.dtype) -> int:
    """Measures a product of two matrices of the size that an encoder's layers have; the best of a few."""
    import torch

    size = 768
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return round(2 * size**3 / _least_seconds(lambda: left @ right) / 1e9)


def _gb_s() -> int:
    """Read and written, copying 64 MB."""
    import torch

    source = torch.ones(16 << 20)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _least_seconds(lambda: target.copy_(source)) / 1e9)


def _least_seconds(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=1, repeat=4))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    name = names[0] if names else platform.processor()
    told = [flag for flag in _TOLD_FLAGS if flag in flags.split()]
    return ", ".join([name, *told])
