"""cuDNN's attention for the encoder, which torch has too and takes last.

On Hopper it is said to take about half the time of what torch takes first, on other GPUs more
(https://github.com/huggingface/transformers/pull/48163): it is tried. Called by its own name, because torch's
setting for it holds for the whole process, other replicas in it included.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, H, F, d] each, the query scaled, in bfloat16 or float16: every position over every other.

    Raises:
        RuntimeError: this cuDNN has nothing for this GPU, type or shape.
    """
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    attended: Tensor = attend(query, key, value, None, False, scale=1.0)[0]
    return attended
