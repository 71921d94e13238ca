"""The limits computed by hand for an H200 (790 TFLOP/s in bfloat16, 4.3 TB/s)."""

from __future__ import annotations

import pytest

from asr_server.model import WhisperSizes
from benchmarks.floors import Floors

H200 = Floors(gflops=790e3, gbytes=4300)


def sizes(decoder_layers: int) -> WhisperSizes:
    return WhisperSizes(
        vocabulary=51866,
        num_mels=128,
        width=1280,
        encoder_layers=32,
        encoder_heads=20,
        encoder_hidden=5120,
        decoder_layers=decoder_layers,
        decoder_heads=20,
        decoder_hidden=5120,
    )


@pytest.mark.parametrize(("decoder_layers", "batch", "rtfx"), [(4, 128, 8100), (32, 128, 3300), (4, 1, 2700)])
def test_the_limit_of_turbo_and_large_v3(decoder_layers: int, batch: int, rtfx: float) -> None:
    limit = H200.rtfx(sizes(decoder_layers), clip_s=30, tokens=100, batch=batch, itemsize=2)
    assert limit == pytest.approx(rtfx, rel=0.03)


def test_a_short_clip_pays_the_whole_window() -> None:
    whole, short = (H200.rtfx(sizes(4), clip_s, 100, 128, 2) for clip_s in (30.0, 5.0))
    assert whole == pytest.approx(6 * short)
