"""What an engine is started with, and what `auto` and 0 stand for on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from asr_server.config import Settings
from asr_server.model import DecoderCache, WhisperSizes

_ENCODE_BATCH_ON_CUDA = 8
_MAX_COMPUTE_WORKERS = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, as /proc/cpuinfo spells them
_MAX_SLOTS = {"cpu": 32, "cuda": 256}  # more only lengthens a step: the products are large enough by then
_SLOT_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}  # of what is free once the weights are in


@dataclass(frozen=True)
class EngineConfig:
    model: str  # directory or hub name
    device: str = "auto"
    dtype: str = "auto"
    max_slots: int = 0  # 0: from free memory
    encode_batch: int = 0  # 0: by device
    cpu_threads: int = 0  # 0: one a core
    compute_workers: int = 0  # 0: by device
    copy_overlap: bool = False
    cuda_graphs: bool = True

    @classmethod
    def from_settings(cls, settings: Settings) -> EngineConfig:
        """One replica's part of the machine."""
        threads = settings.cpu_threads or max(1, available_cores() // max(1, settings.replicas))
        return cls(
            model=settings.model,
            device=settings.device,
            dtype=settings.dtype,
            max_slots=settings.max_slots,
            encode_batch=settings.encode_batch,
            cpu_threads=threads,
            compute_workers=settings.compute_workers,
            copy_overlap=settings.copy_overlap,
        )


@dataclass(frozen=True)
class Tuning:
    """How an engine does its work. Nothing here changes a token."""

    num_slots: int = 16
    encode_batch: int = 8  # chunks encoded in one step at most
    compute_workers: int = 1  # encode batches under way at once: threads on CPU, streams on CUDA
    copy_overlap: bool = False  # copies on streams of their own
    lookahead: bool = False  # a step starts before the one before it is read
    cuda_graphs: bool = True

    @classmethod
    def of(
        cls, config: EngineConfig, sizes: WhisperSizes, device: torch.device, dtype: torch.dtype
    ) -> Tuning:
        """What the configuration leaves open is settled by device."""
        on_cpu = device.type == "cpu"
        workers = config.compute_workers or (
            min(_MAX_COMPUTE_WORKERS, torch.get_num_threads()) if on_cpu else 1
        )
        return cls(
            choose_num_slots(config.max_slots, sizes, device, dtype),
            # On CPU a worker takes one chunk at a time: in a batch its activations would not stay in cache.
            config.encode_batch or (workers if on_cpu else _ENCODE_BATCH_ON_CUDA),
            workers,
            config.copy_overlap,
            lookahead=not on_cpu,  # on CPU there is nothing to overlap with
            cuda_graphs=config.cuda_graphs,
        )


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies in it, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _cpu_flags() & _BFLOAT16_FLAGS else torch.float32


def choose_num_slots(max_slots: int, sizes: WhisperSizes, device: torch.device, dtype: torch.dtype) -> int:
    """As many slots as a share of the free memory holds, within reason; `max_slots` where it is given."""
    if max_slots > 0:
        return max_slots
    share = _SLOT_MEMORY_SHARE[device.type] * free_bytes(device)
    return max(1, min(_MAX_SLOTS[device.type], int(share) // DecoderCache.bytes_per_slot(sizes, dtype)))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return 4 << 30  # no Linux: a modest guess
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def _cpu_flags() -> set[str]:
    lines = _read("/proc/cpuinfo").splitlines()
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
