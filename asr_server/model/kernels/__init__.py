"""Computations that have a kernel of their own on GPUs, in Triton, each beside torch's.

`table.py` decides which are used. Triton is imported only where it may be wanted: torch for CUDA brings it.
None of these kernels was ever run on a GPU; docs/engine.md says what was tested instead. Runs in the
replica's process. Used by `model` and `engine`; knows tensors, no requests.
"""

from asr_server.model.kernels.table import TORCH, Kernels

__all__ = ["TORCH", "Kernels"]
