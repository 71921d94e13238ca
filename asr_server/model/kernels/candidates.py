"""The Triton kernels, and random data in the model's shapes to try each on.

Called once by `engine/runner.py`. The only file that imports Triton's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from asr_server.model.float8 import FP8, dequantise, quantise, quantise_rows
from asr_server.model.kernels.remembered import remembered
from asr_server.model.kernels.table import NUM_WARPS, TORCH, Candidate, Choice, Forms, Kernels, choose
from asr_server.model.layers import (
    Linear,
    attend_audio,
    attend_cached,
    attend_cached_audio,
    cudnn_attention,
    linear_gelu,
)
from asr_server.model.rows import row_lengths
from asr_server.model.sizes import WhisperSizes
from asr_server.model.whisper import add_norm, norm_product

_ENCODE_BATCH = 11
_MAX_ROWS = 64  # enough to tell which is faster, and little memory
_CONTEXT = 128  # positions of text
_REPEATS, _ROUNDS = 20, 3  # calls that are timed together, and how often: the best is what counts
_HEAD_START_CYCLES = 20_000_000  # some 10 ms: mostly longer than the host takes to launch so many calls
_LONGEST_HEAD_START = 8  # times that, on a host that is slow or busy


def choose_kernels(
    setting: str,
    sizes: WhisperSizes,
    device: torch.device,
    dtype: torch.dtype,
    num_ranks: int = 1,
    more: Callable[[Kernels], Iterable[Candidate]] = lambda kernels: (),
    audio_dtype: torch.dtype | None = None,
    fp8_encoder: bool = False,
) -> Choice:
    """Args:
        setting: torch; triton: all kernels, untried; auto: the kernels that win here.
        num_ranks: ranks that work as one; several use torch, because they must choose alike.
        more: candidates of the caller.
        audio_dtype: type of the cached audio; None: `dtype`.
        fp8_encoder: the encoder multiplies in 8-bit floats.
    Raises:
        ValueError: triton cannot run here, or a kernel has left the GPU unusable.
    """
    if setting == "triton":
        return Choice(_all_kernels(device, dtype), "all triton (--kernels)")
    if setting == "torch" or device.type != "cuda" or num_ranks > 1:
        return Choice(TORCH, "")
    try:
        kernels = _all_kernels(device, dtype)
    except ValueError as error:
        return Choice(TORCH, f"torch: {error}")
    attention = partial(decode_attention, kernels, sizes, device, dtype, audio_dtype)
    tried = chain(
        # So few rows are split into parts, which a kernel of its own combines.
        _right_for_one_row_too(attention(), attention(1, sizes.text_positions)),
        attention(1, name="flash_decode_few"),
        encoder_layer(kernels, sizes, device, dtype, fp8_encoder),
        lengths_of_rows(kernels, device),
        products_of_one_row(kernels, sizes, device, dtype),
        more(kernels),
    )
    circumstances = (_versions(device), sizes, dtype, audio_dtype, fp8_encoder)
    return remembered(repr(circumstances), lambda: _try_on_gpu(kernels, tried), partial(_in_forms, kernels))


def _versions(device: torch.device) -> tuple[str | None, ...]:
    import triton

    return torch.cuda.get_device_name(device), torch.__version__, torch.version.cuda, triton.__version__


def _in_forms(kernels: Kernels, forms: Forms) -> Kernels:
    chosen: dict[str, Any] = {
        name: None if form is None else _forms(getattr(kernels, name))[form] for name, form in forms.items()
    }
    return replace(kernels, **chosen)


def _forms(kernel: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    of_warps = {f" of {count} warps": partial(kernel, num_warps=count) for count in NUM_WARPS}
    return {"": kernel} | of_warps


@torch.inference_mode()
def _try_on_gpu(kernels: Kernels, tried: Iterable[Candidate]) -> Choice:
    """Try kernels. After an illegal memory access, every later call in this process fails."""
    try:
        choice = choose(kernels, tried, _time_s)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = f"a kernel in Triton has left the GPU unusable ({str(error).strip().splitlines()[0]})"
        raise ValueError(f"{reason}: --kernels torch does without them") from error
    return choice


def _all_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    try:
        from triton import knobs

        from asr_server.model.kernels import choose_token, elementwise, flash_decode, one_row
    except ImportError as error:
        raise ValueError(f"Triton cannot be imported: {error}") from error
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError("--kernels triton needs a GPU (or TRITON_INTERPRET=1, which is slow and for tests)")
    return Kernels(
        flash_decode=flash_decode.flash_decode,
        choose_token=choose_token.choose_token,
        advance=choose_token.advance,
        add_norm=elementwise.add_norm,
        linear_gelu=linear_gelu if dtype.itemsize == 2 else None,
        quantise_rows=elementwise.quantise_rows,
        whole_attention=cudnn_attention if dtype.itemsize == 2 else None,
        row_lengths=flash_decode.row_lengths,
        norm_product=one_row.norm_product,
        row_product=one_row.row_product,
        flash_decode_few=flash_decode.flash_decode,
        choose_token_few=choose_token.choose_token_in_parts,
    )


def _right_for_one_row_too(many: Iterable[Candidate], one: Iterable[Candidate]) -> Iterator[Candidate]:
    for timed, checked in zip(many, one, strict=True):
        yield replace(timed, checked_too=checked)


def decode_attention(
    kernels: Kernels,
    sizes: WhisperSizes,
    device: torch.device,
    dtype: torch.dtype,
    audio_dtype: torch.dtype | None = None,
    rows: int = _MAX_ROWS,
    context: int = _CONTEXT,
    name: str = "flash_decode",
) -> Iterator[Candidate]:
    heads, positions = sizes.decoder_heads, sizes.audio_positions
    depth, stride = sizes.width // heads, -(-positions // 16) * 16
    draw = _random(device, dtype)
    query = draw(rows, 1, heads, depth) * depth**-0.5
    keys, values = draw(rows, heads, depth, stride), draw(rows, heads, positions, depth)
    scales: tuple[Tensor, ...] = ()
    if audio_dtype == FP8:
        (keys, key_scales), (values, value_scales) = (quantise(each, (-2, -1)) for each in (keys, values))
        scales = key_scales, value_scales
    keys = keys[..., :positions]
    slots = torch.arange(rows, device=device)
    lengths = torch.full_like(slots, positions, dtype=torch.int32)  # the cache's type: what is tried is used
    # Made beforehand, as the cache has it: making it takes as long as the attention itself.
    cross_rows = torch.arange(rows * heads * max(depth, positions), device=device, dtype=torch.int32)

    # Every row has as much text as most steps look at, and one position more.
    context = min(context, sizes.text_positions)
    text_keys, text_values = draw(2, rows, heads, context, depth).unbind()
    new_keys, new_values = draw(2, rows, heads, depth).unbind()
    text_lengths, last = torch.full_like(slots, context), torch.full_like(slots, context - 1)
    mask = torch.zeros(rows, 1, 1, context, device=device, dtype=dtype)

    def reference() -> Tensor:
        exact = (keys, values)
        if scales:
            exact = dequantise(keys, scales[0], dtype), dequantise(values, scales[1], dtype)
        of_audio = attend_cached_audio(query, *exact, cross_rows)
        text_keys[slots, :, last], text_values[slots, :, last] = new_keys, new_values
        return torch.cat([of_audio, attend_cached(query, text_keys, text_values, mask)], dim=1)

    def attended(flash_decode: Callable[..., Tensor]) -> Tensor:
        first, transposed = query[:, 0], keys.transpose(2, 3)
        of_audio = flash_decode(first, transposed, values, slots, lengths, positions, *scales)
        new = {"new_keys": new_keys, "new_values": new_values}
        of_text = flash_decode(first, text_keys, text_values, slots, text_lengths, context, **new)
        return torch.stack([of_audio.flatten(1), of_text.flatten(1)], dim=1)

    assert kernels.flash_decode is not None
    for form, kernel in _forms(kernels.flash_decode).items():
        if form:
            computed = partial(attended, kernel)
            yield Candidate(name, computed, reference, _tolerance(dtype), implementation=kernel, form=form)


def encoder_layer(
    kernels: Kernels,
    sizes: WhisperSizes,
    device: torch.device,
    dtype: torch.dtype,
    fp8: bool,
    rows: int | None = None,
) -> Iterator[Candidate]:
    rows = rows or _ENCODE_BATCH * sizes.audio_positions
    width, hidden, tolerance = sizes.width, sizes.encoder_hidden, _tolerance(dtype)
    draw = _random(device, dtype)

    def added(chosen: Kernels) -> Tensor:
        return torch.stack(add_norm(x, change, norm, chosen))

    x, change, norm = draw(rows, width), draw(rows, width), nn.LayerNorm(width, device=device, dtype=dtype)
    yield Candidate("add_norm", lambda: added(kernels), lambda: added(TORCH), tolerance)

    up = Linear(width, hidden, gelu=True).to(device, dtype)
    up.weight.copy_(draw(hidden, width) * width**-0.5)
    up.bias.copy_(draw(hidden))
    if kernels.linear_gelu is not None:
        yield Candidate("linear_gelu", lambda: up(x, kernels), lambda: up(x), tolerance, maker="cublas")

    heads, positions = sizes.encoder_heads, min(rows, sizes.audio_positions)

    def attention(num_windows: int) -> Candidate:
        qkv = draw(num_windows, positions, 3 * width)
        qkv[..., :width] *= (width // heads) ** -0.5
        attend = partial(attend_audio, qkv, heads)
        ours = partial(attend, kernels=kernels)
        return Candidate("whole_attention", ours, attend, tolerance, maker="cudnn")

    if kernels.whole_attention is not None:  # which plans each number of windows by itself
        yield replace(attention(rows // positions), checked_too=attention(1))

    def quantised(chosen: Kernels) -> Tensor:
        return dequantise(*quantise_rows(wide, chosen), torch.float32)

    if fp8:
        wide = draw(rows, hidden)
        # Where a number lies between two that 8 bits can say, rounding may decide otherwise.
        yield Candidate("quantise_rows", lambda: quantised(kernels), lambda: quantised(TORCH), 0.5)


def lengths_of_rows(kernels: Kernels, device: torch.device) -> Iterator[Candidate]:
    numbers = torch.arange(_MAX_ROWS + 3, device=device)
    audio_of, audio_lengths = numbers.flip(0), (numbers % 5).to(torch.int32)
    positions, active = 7 * numbers[:_MAX_ROWS, None], numbers[:_MAX_ROWS] % 3 > 0

    def compute(look_up: Callable[..., tuple[Tensor, ...]]) -> Tensor:
        found = look_up(slice(3, 3 + _MAX_ROWS), positions, active, audio_of, audio_lengths)
        return torch.stack([*found[:3], found[3].long()])

    assert kernels.row_lengths is not None
    yield Candidate("row_lengths", partial(compute, kernels.row_lengths), partial(compute, row_lengths), 0.0)


def products_of_one_row(
    kernels: Kernels, sizes: WhisperSizes, device: torch.device, dtype: torch.dtype, layers: int = 4
) -> Iterator[Candidate]:
    """Yield the decoder's, of several layers: one's weights would stay in the device's cache."""
    width, hidden, draw = sizes.width, sizes.decoder_hidden, _random(device, dtype)
    x, change, wide = draw(1, 1, width), draw(1, 1, width), draw(1, 1, hidden)
    norm = nn.LayerNorm(width, device=device, dtype=dtype)

    def linear(num_inputs: int, num_outputs: int, gelu: bool = False) -> Linear:
        made = Linear(num_inputs, num_outputs, gelu).to(device, dtype)
        made.weight.copy_(draw(num_outputs, num_inputs) * num_inputs**-0.5)
        made.bias.copy_(draw(num_outputs))
        return made

    shapes = (3 * width, False), (width, False), (hidden, True)
    behind_norm = [linear(width, *shape) for _ in range(layers) for shape in shapes]
    others = [linear(size, width) for _ in range(layers) for size in (width, width, hidden)]

    def normed(chosen: Kernels) -> Tensor:
        found = [norm_product(x, change, norm, each, chosen) for each in behind_norm]
        return torch.cat([*found[0], *(product for _, product in found[1:])], -1)

    def plain(chosen: Kernels) -> Tensor:
        return torch.cat([each(wide if each.weight.shape[1] == hidden else x, chosen) for each in others], -1)

    beside = replace(kernels, norm_product=None, row_product=None)
    tolerance = 2 * _tolerance(dtype)  # of sums of thousands, in another order
    yield Candidate("norm_product", lambda: normed(kernels), lambda: normed(beside), tolerance)
    yield Candidate("row_product", lambda: plain(kernels), lambda: plain(beside), tolerance)


def _random(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-4 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps


def _time_s(compute: Callable[[], Tensor]) -> float:
    """Return seconds a call on the device alone: calls are queued before the first is timed, as in a
    graph.
    """
    for _ in range(3):
        compute()
    return min(_time_once_s(compute) for _ in range(_ROUNDS))


def _time_once_s(compute: Callable[[], Tensor], head_start: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(head_start * _HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(_REPEATS):
        compute()
    end.record()
    has_waited = start.query()  # type: ignore[no-untyped-call]  # the device, for the host
    end.synchronize()
    if has_waited and head_start < _LONGEST_HEAD_START:
        return _time_once_s(compute, 2 * head_start)
    return float(start.elapsed_time(end)) / 1e3 / _REPEATS
