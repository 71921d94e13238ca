"""Tensors by their places in files: rows, scales, bounds, and headers that contradict themselves."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from asr_server.checkpoint.tensors import (
    find_weights,
)


def test_a_file_of_safetensors_is_read_as_its_own_library_reads_it(tmp_path: Path) -> None:
    kinds = (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
    written = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    save_file(written, tmp_path / "model.safetensors")
    (file,) = find_weights(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    assert file.tensors.keys() == written.keys()
    for name, tensor in written.items():
        found = file.tensors[name]
        raw = content[found.offset : found.end]
        assert (found.shape, raw) == ((2, 3), bytes(tensor.view(torch.uint8).numpy().tobytes()))
