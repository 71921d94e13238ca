"""Read the memory and processor time of the server and its child processes from /proc.

Elsewhere than on Linux there is nothing to read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from asr_server.api.state import AppState
from asr_server.audio.ffmpeg_client import decode_processes

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat behind the command's name, from 0.
_OWN_AND_CHILDRENS_TICKS: Final = slice(11, 15)
_CHILDRENS_TICKS: Final = slice(13, 15)  # of those that have ended
_RESIDENT_PAGES: Final = 21
_MAX_TRIES: Final = 3

STATM: Final = Path("/proc/self/statm")
Labels = tuple[str, str]  # of a replica: its model's name and its own
DECODING: Final = ("", "")  # in their place


class Usage(NamedTuple):
    num_processes: int
    resident_bytes: int  # pages that processes share count for each
    cpu_s: float  # ended children included, so that it never falls


def usage_of(pid: int) -> Usage | None:
    """Sum up a process and its children; None if it has ended or cannot be read. Blocks."""
    try:
        for _ in range(_MAX_TRIES):
            own = _stat(pid)
            processes = [own, *_children(pid)]
            if _stat(pid)[_CHILDRENS_TICKS] == own[_CHILDRENS_TICKS]:  # else one ended meanwhile
                break
    except OSError:
        return None
    ticks = sum(int(field) for stat in processes for field in stat[_OWN_AND_CHILDRENS_TICKS])
    pages = sum(int(stat[_RESIDENT_PAGES]) for stat in processes)
    return Usage(len(processes), pages * _PAGE_BYTES, ticks / _TICKS_PER_S)


def usage_of_each(pids: Mapping[Labels, int]) -> dict[Labels, Usage]:
    """Blocks."""
    usages = {labels: usage_of(pid) for labels, pid in pids.items()}
    return {labels: usage for labels, usage in usages.items() if usage}


def child_pids(state: AppState) -> dict[Labels, int]:
    """Return the child processes of this machine: of replicas by their labels, and of decoding."""
    pids = {
        (model.name, replica_state.replica.name): replica_state.replica.pid
        for model in state.models
        for replica_state in model.dispatcher.supervisor.replica_states
    }
    pids[DECODING] = decode_processes.forkserver_pid
    return {labels: pid for labels, pid in pids.items() if pid is not None}


def resident_bytes() -> int:
    """Return this process's memory; 0 without /proc."""
    return int(STATM.read_text().split()[1]) * _PAGE_BYTES if STATM.exists() else 0


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children(pid: int) -> Iterator[list[str]]:
    """Yield each child of the main thread, which starts all of ours."""
    with contextlib.suppress(FileNotFoundError):  # some kernels do not list them
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                yield _stat(int(child))
