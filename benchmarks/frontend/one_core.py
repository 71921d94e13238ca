"""Speed by processor time: what one core reads in a second, decode processes included."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .ways import WAYS, Way


def cpu_s(run: Way, path: Path) -> float | None:
    """Processor time of one run: this process, those that decode for it, programs that have ended."""
    others = _others_s()
    start = time.process_time()
    if run(path) is None:
        return None
    own = time.process_time() - start
    return own + _others_s() - others


def _others_s() -> float:
    ended = os.times()
    total = ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        total += int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0]) / 1e9
    return total


def one_core(paths: dict[str, Path], rounds: int, duration_s: float, tick: Callable[[], None]) -> Any:
    """format -> way -> RTFx by processor time, one figure a round."""
    results: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in paths}
    for run in WAYS.values():  # code and libraries are loaded, the decode processes started
        run(paths["webm opus 48k stereo"])
        run(paths["wav 48k stereo"])
    for _ in range(rounds):
        for name, path in paths.items():
            for way, run in WAYS.items():
                if (seconds := cpu_s(run, path)) is not None:
                    results[name][way].append(duration_s / seconds)
                tick()
    return results
