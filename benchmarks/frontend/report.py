"""The tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reporting import spread

from .threads import THREADS
from .ways import WAYS


def show(results: dict[str, Any], console: Console) -> None:
    if results["one_core"]:
        console.print(one_core_table(results["one_core"]))
    if results["threads"]:
        console.print(threads_table(results["threads"]))
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


def threads_table(results: dict[str, Any]) -> Table:
    table = Table(title="RTFx by threads; event loop's delay in ms, 99th percentile, with 2 threads")
    for column in ("format", *map(str, THREADS), "2 / 1", "2 / 1 processes", "ours", "whole file"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, entry in results.items():
        speeds = [f"{statistics.median(entry['threads'][str(number)]):,.0f}" for number in THREADS]
        scaling = [_scaling(entry[kind]) for kind in ("threads", "processes")]
        delays = [_spread(values, 1) for values in entry["delay_p99_ms"].values()]
        table.add_row(name, *speeds, *scaling, *delays)
    return table


def _scaling(speeds: dict[str, list[float]]) -> str:
    return _spread([two / one for one, two in zip(speeds["1"], speeds["2"], strict=True)], 2)


def _spread(values: list[float], digits: int = 0) -> str:
    return spread(values, digits) if values else "not opened"


def _ratio(ways: dict[str, list[float]], way: str) -> str:
    """Round by round, since what disturbs a round disturbs both."""
    if not ways[way]:
        return "-"
    return _spread([ours / other for ours, other in zip(ways["ours"], ways[way], strict=True)], 2)
