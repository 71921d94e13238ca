"""What a machine's matrix rate and memory bandwidth allow, and what Whisper needs of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from asr_server.model import WhisperSizes
from asr_server.model.layers import Linear


@dataclass(frozen=True)
class Floors:
    gflops: float  # of a matrix product of Whisper's shape, 10^9 a second
    gbytes: float  # read from memory, 10^9 a second

    def encode_s(self, sizes: WhisperSizes) -> float:
        """One chunk: the encoder's products and the projection of the cross-attention's keys and values."""
        frames, width = sizes.audio_positions, sizes.width
        layer = 2 * frames * width * (4 * width + 2 * sizes.encoder_hidden) + 4 * frames * frames * width
        stem = 2 * 2 * frames * 3 * sizes.num_mels * width + 2 * frames * 3 * width * width
        cross = 2 * frames * width * 2 * width * sizes.decoder_layers
        return (layer * sizes.encoder_layers + stem + cross) / (self.gflops * 1e9)

    def decode_step_s(self, sizes: WhisperSizes, batch: int, itemsize: int) -> float:
        """One step: every weight once, and the audio's keys and values of every sequence."""
        width = sizes.width
        weights = sizes.decoder_layers * (6 * width * width + 2 * width * sizes.decoder_hidden)
        weights += sizes.vocabulary * width
        audio = batch * 2 * sizes.decoder_layers * sizes.audio_positions * width
        return (weights + audio) * itemsize / (self.gbytes * 1e9)

    def rtfx(self, sizes: WhisperSizes, clip_s: float, tokens: int, batch: int, itemsize: int) -> float:
        """The limit, encoder and decoder one after the other: a short clip pays the whole padded encoder."""
        decode_s = tokens * self.decode_step_s(sizes, batch, itemsize) / batch
        return clip_s / (self.encode_s(sizes) + decode_s)


@cache
def measure_floors(dtype: torch.dtype, device: torch.device) -> Floors:
    if device.type == "cuda":
        return Floors(_gflops_cuda(dtype, device), _gbytes_cuda(device))
    return Floors(_gflops_cpu(dtype), _gbytes_cpu())


def _gflops_cpu(dtype: torch.dtype, width: int = 512, rows: int = 1500) -> float:
    """Measures a feed-forward product that stays in cache."""
    linear = Linear(width, 4 * width)
    torch.nn.init.normal_(linear.weight, std=0.02)
    linear = linear.to(dtype)
    linear.pack()
    x = torch.randn(rows, width).to(dtype)
    return 2 * rows * width * 4 * width / _least_s(lambda: linear(x)) / 1e9


def _gbytes_cpu(size: int = 1 << 28) -> float:
    """Measures a reduction over more than any cache holds."""
    block = torch.zeros(size // 4, dtype=torch.int32)
    return size / _least_s(block.amax) / 1e9


def _gflops_cuda(dtype: torch.dtype, device: torch.device, width: int = 8192) -> float:
    """Measures a large square product of random numbers: zeros would be faster."""
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / _least_s(lambda: left @ right, torch.cuda.synchronize) / 1e9


def _gbytes_cuda(device: torch.device, size: int = 1 << 32) -> float:
    """Measures a copy within the device's memory: read once, written once."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _least_s(lambda: target.copy_(source), torch.cuda.synchronize) / 1e9


def _least_s(
    call: Callable[[], object], synchronize: Callable[[], object] = lambda: None, repeats: int = 15
) -> float:
    call()
    synchronize()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
