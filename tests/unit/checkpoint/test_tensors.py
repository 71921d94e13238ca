"""Tensors by their places in files: rows, scales, bounds, and headers that contradict themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asr_server.checkpoint.tensors import (
    StoredTensor,
    WeightsFile,
    find_weights,
    read_stored,
    write_stored,
)
from asr_server.errors import CheckpointError


def test_rows_of_a_tensor_lie_where_they_do_in_it_and_take_their_scales_along() -> None:
    scale = StoredTensor("F32", (6,), 1000)
    tensor = StoredTensor("F16", (6, 5), 100, scale)
    assert tensor.end == 160
    assert tensor.rows(2, 3) == StoredTensor("F16", (3, 5), 120, StoredTensor("F32", (3,), 1008))
    one_scale = StoredTensor("F32", (), 1000)
    assert tensor._replace(scale=one_scale).rows(1, 1).scale == one_scale


def write_safetensors(folder: Path, header: dict[str, Any], num_bytes: int = 16) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))


def entry(first: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


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


def test_noted_tensors_are_read_again_until_their_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(100))
    tensors = {"a": StoredTensor("I8", (4, 5), 20, StoredTensor("F32", (4,), 80))}
    write_stored(tmp_path, WeightsFile(file, tensors), revision="abc")
    assert read_stored(tmp_path) == (file, tensors, {})
    assert find_weights(tmp_path) == [(file, tensors, {})]
    file.write_bytes(bytes(101))
    with pytest.raises(CheckpointError, match="has changed since the server was started"):
        read_stored(tmp_path)


def test_a_damaged_note_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "stored_tensors.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"is damaged: remove {tmp_path}"):
        read_stored(tmp_path)
