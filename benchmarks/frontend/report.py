"""The tables and the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.reporting import pyplot, spread

from .ways import WAYS


def show(results: dict[str, Any], console: Console) -> None:
    if results["one_core"]:
        console.print(one_core_table(results["one_core"]))
    if results["memory_mb"]:
        grown = ", ".join(f"{way} {value:.0f}" for way, value in results["memory_mb"].items())
        console.print(f"Peak memory that {results['memory_s']:g} s of mp3 add, MB: {grown}")


def one_core_table(results: dict[str, Any]) -> Table:
    table = Table(title="RTFx of one core: median (lowest to highest)")
    for column in ("format", *WAYS, "ours / librosa", "ours / PyAV"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, ways in results.items():
        cells = [_spread(values) for values in ways.values()]
        ratios = [_ratio(ways, way) for way in ("librosa.load", "PyAV per frame")]
        table.add_row(name, *cells, *ratios)
    return table


def _spread(values: list[float], digits: int = 0) -> str:
    return spread(values, digits) if values else "not opened"


def _ratio(ways: dict[str, list[float]], way: str) -> str:
    """Round by round, since what disturbs a round disturbs both."""
    if not ways[way]:
        return "-"
    return _spread([ours / other for ours, other in zip(ways["ours"], ways[way], strict=True)], 2)


def plot(results: dict[str, Any], path: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(8, 6), layout="constrained")
    names = list(results["one_core"])
    for number, way in enumerate(WAYS):
        medians = [statistics.median(results["one_core"][name][way] or [0]) for name in names]
        axes.barh(np.arange(len(names)) + 0.2 * number, medians, 0.2, label=way)
    axes.set_yticks(np.arange(len(names)) + 0.3, names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="audio seconds per second of one core")
    axes.legend()
    figure.savefig(path, dpi=120)
