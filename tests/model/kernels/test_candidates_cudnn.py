"""cuDNN's attention against torch's own, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from asr_server.model.kernels import Kernels
from asr_server.model.kernels.candidates import cudnn_attention
from asr_server.model.layers import attend_audio

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(8, 1500), (3, 1500), (1, 250), (2, 400)])
def test_every_position_attends_to_every_other(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(*shape, 3 * 4 * 64, device="cuda", dtype=torch.bfloat16)
    qkv[..., : 4 * 64] *= 0.125
    try:
        found = attend_audio(qkv, 4, Kernels(encoder_attention=cudnn_attention))
    except RuntimeError as error:
        pytest.skip(f"this cuDNN has none, as a start would notice: {error}")
    torch.testing.assert_close(found, attend_audio(qkv, 4), atol=0.03, rtol=0)
