"""Computations that have a kernel of their own on GPUs, in Triton, each beside torch's.

`table.py` decides which are used. Triton is imported only where it may be wanted: torch for CUDA brings it.
engine/README.md has what each takes on a GPU, and what was never run on one. Runs in the replica's process.
Used by `model` and `engine`; knows tensors, no requests.
"""

from asr_server.model.kernels.table import TORCH, Kernels

__all__ = ["TORCH", "Kernels"]
