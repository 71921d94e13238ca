"""Turns arrays and tensors into bytes with a type and a shape, and back. Used by `wire.py`.

Torch is loaded only by a process that has it already or that receives a tensor.
"""

from __future__ import annotations

import math
import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


TORCH: Final = "torch."  # begins the type's name where the array is a tensor: `torch.bfloat16`
# Object arrays hold addresses, and strings are not what is sent here.
_KINDS: Final = frozenset("biufc")
# What `dtype.str` is for these. numpy reads far more, some of it as Python, with errors of any kind.
_NAME: Final = re.compile(r"[<>|][biufc]\d{1,2}")

Bytes = npt.NDArray[np.uint8]


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def type_name(value: Any) -> str:
    """`<f4` for an array, `torch.bfloat16` for a tensor.

    Raises NotImplementedError for types that are no numbers.
    """
    if _is_tensor(value):
        return str(value.dtype)
    if value.dtype.kind not in _KINDS:
        raise NotImplementedError(f"arrays of {value.dtype} do not cross the wire")
    return str(value.dtype.str)


def num_bytes(value: Any) -> int:
    return int(value.nbytes)


def as_bytes(value: Any) -> Bytes:
    """The content [num_bytes] in its own order: a view where it is contiguous, else one copy."""
    if _is_tensor(value):
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        viewed: Bytes = flat.view(torch.uint8).numpy()
        return viewed
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def from_bytes(content: Any, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any] | torch.Tensor:
    """The array or tensor on this memory, which is not copied.

    Raises ValueError when type, shape and content do not fit together.
    """
    data = np.frombuffer(content, np.uint8)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape}")
    if name.startswith(TORCH):
        return _tensor(data, name, shape)
    if not _NAME.fullmatch(name):
        raise ValueError(f"no type of numbers: {name!r}")
    dtype = np.dtype(name)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {name} of shape {shape}")
    return data.view(dtype).reshape(shape)


def _tensor(data: Bytes, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    dtype = getattr(torch, name.removeprefix(TORCH), None)
    if not isinstance(dtype, torch.dtype) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {name} of shape {shape}")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(_writable(data)).view(dtype).view(shape)


def _writable(data: Bytes) -> Bytes:
    """torch knows no read-only tensors and warns of them: what was received is copied for it, once."""
    return data if data.flags.writeable else data.copy()


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
