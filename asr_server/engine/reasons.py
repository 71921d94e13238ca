"""What an engine runs with, and why, in words for whoever runs it."""

from __future__ import annotations

import torch

from asr_server.core import EngineInfo
from asr_server.engine.config import MAX_SLOTS, SLOT_MEMORY_SHARE, EngineConfig


def engine_info(config: EngineConfig) -> EngineInfo:
    """
    Args:
        config: with everything chosen.
    """
    on_gpu = config.device == "cuda"
    reasons = {
        "device": torch.cuda.get_device_name() if on_gpu else "no GPU was found",
        "dtype": _why_dtype(config.dtype, "GPU" if on_gpu else "processor"),
        "num_slots": _why_num_slots(config),
    }
    return EngineInfo(config.device, config.dtype, config.num_slots, torch.get_num_threads(), reasons)


def _why_dtype(dtype: str, processor: str) -> str:
    return f"the {processor} multiplies in it" if dtype == "bfloat16" else f"the {processor} has no bfloat16"


def _why_num_slots(config: EngineConfig) -> str:
    if config.num_slots == MAX_SLOTS[config.device]:
        return "more would only lengthen a step"
    return f"{SLOT_MEMORY_SHARE[config.device]:.0%} of the memory that was free"
