"""Choose Triton's kernels, or torch's operations, when a model is loaded.

The kernels are compared with torch once, on random data. The only file that imports Triton's kernels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from asr_server.checkpoint.cache import writable
from asr_server.model.cache import DecoderCache
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.rows import rows_of
from asr_server.model.whisper import Whisper

NUM_ROWS = 8  # that are compared

logger = logging.getLogger(__name__)


def choose_kernels(
    setting: str, model: Whisper, choice_error: Callable[[Kernels], float]
) -> tuple[Kernels, str]:
    """Return the kernels, and on a GPU a line that names them.

    Args:
        setting: torch; auto: Triton's kernels on a GPU, if they agree with torch.
        choice_error: compares the kernels that choose tokens with torch.
    Raises:
        ValueError: a kernel has left the GPU unusable.
    """
    if setting == "torch" or model.device.type != "cuda" or model.shard.count > 1:
        return TORCH, ""
    os.environ.setdefault("TRITON_CACHE_DIR", str(writable("triton")))  # survives a container
    choice = check_kernels(triton_kernels, model, choice_error)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = "a kernel of Triton has left the GPU unusable: --kernels torch does without them"
        raise ValueError(reason) from error
    return choice


def triton_kernels() -> Kernels:
    from asr_server.model.kernels import choose_token, elementwise, flash_decode, one_row

    return Kernels(
        flash_decode=flash_decode.flash_decode,
        store_audio=elementwise.store_audio,
        row_lengths=flash_decode.row_lengths,
        add_norm=elementwise.add_norm,
        norm_product=one_row.norm_product,
        row_product=one_row.row_product,
        choose_token=choose_token.choose_token,
        advance=choose_token.advance,
    )


@torch.inference_mode()
def check_kernels(
    load: Callable[[], Kernels], model: Whisper, choice_error: Callable[[Kernels], float]
) -> tuple[Kernels, str]:
    """Return the kernels if they run and agree with torch, else torch's operations after a warning."""
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    try:
        kernels = load()
        errors = [decoder_error(kernels, model, num_rows) for num_rows in (1, NUM_ROWS)]
        error = max(*errors, choice_error(kernels))
        if error <= tolerance:
            return kernels, "triton"
        reason = f"they differ from torch by {error:.2g}, more than {tolerance:g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # whatever goes wrong in a compiler or a driver, torch can do the same
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
    logger.warning("decoding takes two to three times as long, as Triton's kernels are not used: %s", reason)
    return TORCH, f"torch: {reason}"


def decoder_error(kernels: Kernels, model: Whisper, num_rows: int) -> float:
    """Return the largest relative error in a step of one decoder layer."""
    sizes = replace(model.sizes, decoder_layers=1)
    cache = DecoderCache(sizes, num_rows, model.device, model.dtype, kernels=kernels)
    generator = torch.Generator(model.device).manual_seed(0)
    for stored in (cache.keys, cache.values, cache.cross_keys, cache.cross_values):
        stored.normal_(generator=generator)
    depth = sizes.width // sizes.decoder_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)

    x, change = draw(2, num_rows, 1, sizes.width).unbind()
    query, key, value = draw(3, num_rows, 1, sizes.decoder_heads, depth).unbind()
    active = torch.ones(num_rows, dtype=torch.long, device=model.device)
    positions = (active.cumsum(0) * (sizes.text_positions - 1) // num_rows)[:, None]

    def compute(chosen: Kernels) -> list[Tensor]:
        cache.kernels = chosen
        rows = rows_of(cache, slice(0, num_rows), positions, sizes.text_positions, active)
        text = rows.attend_text(0, query * depth**-0.5, key, value)
        audio = rows.attend_audio(0, query * depth**-0.5)
        stored = cache.keys.clone(), cache.values.clone()
        return [text, audio, *stored, *model.decoder.layers[0](x, change, rows)]

    return max(map(relative_error, compute(kernels), compute(TORCH)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference.nan_to_num(torch.inf))
