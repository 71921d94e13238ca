"""Computations that have a kernel of their own on GPUs, in Triton, each beside torch's.

`table.py` decides which are used. Triton is imported only where it may be wanted: torch for CUDA brings it.
Of the kernels of this folder none was ever run on a GPU; docs/engine.md says what was tested instead.
"""

from asr_server.model.kernels.table import TORCH, Kernels

__all__ = ["TORCH", "Kernels"]
