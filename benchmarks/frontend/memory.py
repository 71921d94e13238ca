"""Peak memory that a long file adds to that of a short one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from .ways import WAYS


def _grown_mb(way: str, path: Path, connection: Any) -> None:
    WAYS[way](path.with_name("short"))  # code and libraries are loaded before counting
    before = _peak_mb()
    WAYS[way](path)
    connection.send(_peak_mb() - before)


def _peak_mb() -> float:
    family = (psutil.Process(), *psutil.Process().children(recursive=True))
    texts = [Path(f"/proc/{process.pid}/status").read_text() for process in family]
    return sum(int(text.split("VmHWM:")[1].split()[0]) for text in texts) / 1024


def memory(path: Path, tick: Callable[[], None]) -> dict[str, float]:
    """Peak memory in MB that one long file adds to that of a short one, each way in a process of its own."""
    results = {}
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_grown_mb, args=(way, path, sender))
        process.start()
        results[way] = receiver.recv()
        process.join()
        tick()
    return results
