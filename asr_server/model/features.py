"""Log-mel spectrograms as Whisper was trained on them, batched, on the model's device.

Slaney's mel scale (Auditory Toolbox, 1998): linear up to 1 kHz, then logarithmic.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from asr_server.core import SAMPLE_RATE, Samples

FFT_SIZE = 400  # 25 ms
HOP = 160  # 10 ms
_FRAMES_BEHIND = FFT_SIZE // HOP  # that still see the last samples; beyond them is only silence
_LINEAR_HZ_PER_MEL = 200 / 3
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27  # of frequency, per mel above the break
_HIGHEST_MEL = _BREAK_MEL + float(np.log(SAMPLE_RATE / 2 / _BREAK_HZ)) / _LOG_STEP


@lru_cache
def mel_filters(num_mels: int) -> npt.NDArray[np.float32]:
    """Return [num_mels, FFT_SIZE // 2 + 1]: overlapping triangles of equal area over 0 to 8 kHz."""
    bins_hz = np.linspace(0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)
    edges = np.linspace(0, _HIGHEST_MEL, num_mels + 2)
    above_hz = _BREAK_HZ * np.exp(_LOG_STEP * (edges - _BREAK_MEL))
    edges_hz: npt.NDArray[np.float64] = np.where(edges < _BREAK_MEL, edges * _LINEAR_HZ_PER_MEL, above_hz)
    left, centre, right = (edges_hz[i : num_mels + i, None] for i in range(3))
    rising = (bins_hz - left) / (centre - left)
    falling = (right - bins_hz) / (right - centre)
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * 2 / (right - left)).astype(np.float32)


class LogMel(nn.Module):
    """Turn samples into [B, num_mels, num_frames], padded to the window by default.

    Silence follows the samples, as in transformers, or zeros the spectrogram, as in openai-whisper.
    """

    filters: Tensor
    window: Tensor

    def __init__(self, num_mels: int, num_frames: int, pads_with_zeros: bool = False) -> None:
        super().__init__()
        self.num_frames = num_frames
        self.pads_with_zeros = pads_with_zeros
        self.register_buffer("filters", torch.from_numpy(mel_filters(num_mels)), persistent=False)
        self.register_buffer("window", torch.hann_window(FFT_SIZE), persistent=False)

    def forward(self, chunks: Sequence[Samples], num_frames: int | None = None) -> Tensor:
        """Return float32 in any precision; samples beyond the window are cut off."""
        device, most = self.window.device, self.num_gathered()
        longest = min(max(len(chunk) for chunk in chunks), self.num_frames * HOP)
        samples = self.gather(chunks, min(most, (-(-longest // HOP) + _FRAMES_BEHIND) * HOP))
        return self.of_samples(samples.to(device), self.lengths(chunks).to(device), num_frames)

    def lengths(self, chunks: Sequence[Samples]) -> Tensor:
        """Return the frames that each chunk fills, [B] on the host."""
        return torch.tensor([len(chunk) // HOP for chunk in chunks])

    def gather(
        self, chunks: Sequence[Samples], num_samples: int, apply: Callable[..., Iterable[None]] = map
    ) -> Tensor:
        """Return [B, num_samples] on the host, pinned for a GPU. An executor's `map` copies side by side."""
        samples = torch.empty(len(chunks), num_samples, pin_memory=self.window.is_cuda)
        # Through numpy: torch itself warns where a chunk's memory is read-only, as memory shared with the API
        # process is.
        list(apply(_fill, samples.numpy(), (chunk[: self.num_frames * HOP] for chunk in chunks)))
        return samples

    def num_gathered(self, num_frames: int | None = None) -> int:
        """Return the samples from which frames are computed.

        Around the last frame of a whole window transformers sees the sound mirrored, as `stft` does it;
        openai-whisper sees the silence behind it.
        """
        if num_frames and num_frames < self.num_frames:
            return num_frames * HOP
        return (self.num_frames + (_FRAMES_BEHIND if self.pads_with_zeros else 0)) * HOP

    def of_samples(self, samples: Tensor, lengths: Tensor, num_frames: int | None = None) -> Tensor:
        """Turn the results of `gather` and `lengths` into [B, num_mels, num_frames]."""
        num_frames = num_frames or self.num_frames
        spectrum = torch.stft(samples, FFT_SIZE, HOP, window=self.window, return_complex=True)[..., :-1]
        real, imaginary = torch.view_as_real(spectrum).square().unbind(-1)
        power = real + imaginary  # [B, FFT_SIZE // 2 + 1, frames]; `sum` takes ten times as long
        mel = (self.filters @ power).clamp_(min=1e-10).log10_()
        floor = mel.amax(dim=(1, 2), keepdim=True) - 8.0
        silence = mel.new_full((len(mel), 1, 1), -10.0)
        whole = torch.empty(len(mel), len(self.filters), num_frames, device=mel.device)
        computed = min(mel.shape[-1], num_frames)
        whole[..., :computed] = torch.maximum(mel[..., :computed], floor)
        whole[..., computed:] = torch.maximum(silence, floor)
        whole.add_(4.0).div_(4.0)
        if self.pads_with_zeros:
            frames = torch.arange(num_frames, device=mel.device)
            whole.masked_fill_((frames >= lengths[:, None])[:, None], 0.0)
        return whole


def _fill(row: npt.NDArray[np.float32], chunk: Samples) -> None:
    row[: len(chunk)] = chunk
    row[len(chunk) :] = 0
