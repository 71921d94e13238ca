"""Triton kernels for GPUs, each beside torch's operations. `engine/warm_up.py` decides on their use."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """The kernels in use, named as the functions; None: torch's operations."""

    flash_decode: Callable[..., Tensor] | None = None
    store_audio: Callable[..., None] | None = None
    row_lengths: Callable[..., tuple[Tensor, ...]] | None = None
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    norm_product: Callable[..., tuple[Tensor, Tensor]] | None = None  # these two of one row
    row_product: Callable[..., Tensor] | None = None
    choose_token: Callable[..., None] | None = None
    advance: Callable[..., None] | None = None


TORCH = Kernels()


def triton_kernels() -> Kernels:
    from asr_server.model.kernels import choose_token, flash_decode, layers

    functions = vars(choose_token) | vars(flash_decode) | vars(layers)
    return Kernels(**{kernel.name: functions[kernel.name] for kernel in fields(Kernels)})
