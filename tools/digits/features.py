"""Log-mel features as the served model gets them, and what training does to them."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers.audio_utils import mel_filter_bank

from .clips import SAMPLE_RATE


class LogMel(nn.Module):
    """WhisperFeatureExtractor's log-mel for batches of any length."""

    def __init__(self) -> None:
        super().__init__()
        filters = mel_filter_bank(201, 80, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        self.filters: torch.Tensor
        self.window: torch.Tensor
        self.register_buffer("filters", torch.tensor(filters.T, dtype=torch.float32))
        self.register_buffer("window", torch.hann_window(400))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [rows, samples] to [rows, 80, samples / 160]."""
        spectrum = torch.stft(samples, 400, 160, window=self.window, return_complex=True)[..., :-1]
        power = spectrum.real**2 + spectrum.imag**2
        log_mel = torch.log10(torch.clamp(self.filters @ power, min=1e-10))
        top = log_mel.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log_mel, top - 8.0) + 4.0) / 4.0


def warp(features: torch.Tensor) -> torch.Tensor:
    """Stretch the frequency axis of each row by 0.88 to 1.14, as a longer or shorter vocal tract would."""
    rows, bins, _ = features.shape
    ratio = torch.exp(torch.empty(rows, 1).uniform_(math.log(0.88), math.log(1.14)))
    place = (torch.arange(bins)[None, :] * ratio).clamp(0, bins - 1)
    lower = place.floor().long().clamp(max=bins - 2)
    share = (place - lower)[:, :, None]
    index = lower[:, :, None].expand(-1, -1, features.shape[2])
    return features.gather(1, index) * (1 - share) + features.gather(1, index + 1) * share


def mask(features: torch.Tensor) -> torch.Tensor:
    """SpecAugment (Park and others, 2019): up to two bands of 12 bins and one gap of 80 ms in each second."""
    rows, bins, frames = features.shape
    floor = features.mean(dim=(1, 2), keepdim=True)
    hidden = torch.zeros(rows, bins, frames, dtype=torch.bool)
    for _ in range(2):
        first, width = torch.randint(0, bins, (rows, 1)), torch.randint(0, 13, (rows, 1))
        place = torch.arange(bins)[None, :]
        hidden |= ((place >= first) & (place < first + width))[:, :, None]
    for _ in range(max(1, frames // 200)):
        first, width = torch.randint(0, frames, (rows, 1)), torch.randint(0, 9, (rows, 1))
        place = torch.arange(frames)[None, :]
        hidden |= ((place >= first) & (place < first + width))[:, None, :]
    return torch.where(hidden, floor, features)
