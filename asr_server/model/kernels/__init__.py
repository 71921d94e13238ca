"""Triton kernels for GPUs, each beside torch's operations. `table.py` decides which are used."""

from asr_server.model.kernels.table import TORCH, Kernels

__all__ = ["TORCH", "Kernels"]
