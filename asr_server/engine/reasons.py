"""What an engine runs with, and why, in words for whoever runs it."""

from __future__ import annotations

import torch

from asr_server.channel.messages import EngineInfo
from asr_server.engine.config import MAX_SLOTS, SLOT_MEMORY_SHARE, EngineConfig
from asr_server.machine import mps_is_running


def engine_info(config: EngineConfig, kernels: str = "") -> EngineInfo:
    """
    Args:
        config: with everything chosen.
        kernels: which of them are used, and why; empty where there was nothing to choose.
    """
    on_gpu = config.device == "cuda"
    reasons = {
        "device": _gpu(config) if on_gpu else "no GPU was found",
        "dtype": _why_dtype(config.dtype, "GPU" if on_gpu else "processor"),
        "num_slots": _why_num_slots(config),
        "kernels": kernels,
    }
    if on_gpu and config.num_on_device > 1:
        reasons["num_replicas"] = _how_they_share(config.num_on_device)
    return EngineInfo(config.device, config.dtype, config.num_slots, torch.get_num_threads(), reasons)


def _gpu(config: EngineConfig) -> str:
    return torch.cuda.get_device_name() + ("" if config.cuda_graphs else ", without CUDA graphs")


def _how_they_share(num_on_device: int) -> str:
    how = "at once, through MPS" if mps_is_running() else "in turns, as no MPS daemon runs"
    return f"{num_on_device} share a GPU {how}"


def _why_dtype(dtype: str, processor: str) -> str:
    return f"the {processor} multiplies in it" if dtype == "bfloat16" else f"the {processor} has no bfloat16"


def _why_num_slots(config: EngineConfig) -> str:
    if config.num_slots == MAX_SLOTS[config.device]:
        return "more would only lengthen a step"
    return f"{SLOT_MEMORY_SHARE[config.device]:.0%} of the memory that was free"
