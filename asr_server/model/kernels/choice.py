"""Choose Triton's kernels, or torch's operations. The only file that imports the kernels."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from asr_server.checkpoint.cache import writable
from asr_server.model.kernels import TORCH, Kernels

logger = logging.getLogger(__name__)


def choose_kernels(
    setting: str, device: torch.device, compute: Callable[[Kernels], list[Tensor]], tolerance: float
) -> tuple[Kernels, str]:
    """Return the kernels, and on a GPU a line that names them.

    Args:
        setting: torch; auto: Triton's kernels on a GPU, if they agree with torch.
        compute: what kernels are compared by.
        tolerance: relative error of a tensor; integers must be equal.
    Raises:
        ValueError: a kernel has left the GPU unusable.
    """
    if setting == "torch" or device.type != "cuda":
        return TORCH, ""
    os.environ.setdefault("TRITON_CACHE_DIR", str(writable("triton")))  # survives a container
    choice = check_kernels(triton_kernels, compute, tolerance)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = "a kernel of Triton has left the GPU unusable: --kernels torch does without them"
        raise ValueError(reason) from error
    return choice


def triton_kernels() -> Kernels:
    from asr_server.model.kernels import choose_token, flash_decode, layers

    functions = vars(choose_token) | vars(flash_decode) | vars(layers)
    return Kernels(**{kernel.name: functions[kernel.name] for kernel in fields(Kernels)})


@torch.inference_mode()
def check_kernels(
    load: Callable[[], Kernels], compute: Callable[[Kernels], list[Tensor]], tolerance: float
) -> tuple[Kernels, str]:
    """Return the kernels if they run and agree with torch, else torch's operations after a warning."""
    try:
        kernels = load()
        error = max(map(_relative_error, compute(kernels), compute(TORCH)))
        if error <= tolerance:
            return kernels, "triton"
        reason = f"they differ from torch by {error:.2g}, more than {tolerance:g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever goes wrong in a compiler or a driver, torch can do the same
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    logger.warning("decoding takes two to three times as long, as Triton's kernels are not used: %s", reason)
    return TORCH, f"torch: {reason}"


def _relative_error(found: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else math.inf
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference.nan_to_num(torch.inf))
