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
    checked,
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


@pytest.mark.parametrize(
    ("dtype", "shape", "offset", "kind"),
    [
        ("F31", (1,), 0, ValueError),
        (None, (1,), 0, ValueError),
        ("F32", (1,) * 9, 0, ValueError),
        ("F32", (-1,), 0, ValueError),
        ("F32", (True,), 0, ValueError),
        ("F32", (1,), 101, ValueError),
        ("F32", (25,), 1, EOFError),
    ],
)
def test_what_no_tensor_of_a_file_can_be_is_refused(
    dtype: Any, shape: tuple[Any, ...], offset: int, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        checked(dtype, shape, offset, num_bytes=100)


def test_a_kind_of_numbers_that_is_none_is_told_in_part() -> None:
    with pytest.raises(ValueError, match=f"^numbers of type {'x' * 20} are not read$"):
        checked("x" * 21, (1,), 0, num_bytes=100)


def test_a_tensor_may_reach_to_the_last_byte() -> None:
    assert checked("F32", (25,), 0, num_bytes=100).end == 100
    assert checked("U8", (1,) * 8, 99, num_bytes=100).end == 100


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


def test_tensors_are_found_behind_the_header_by_their_names_without_model(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "model.a": entry(0, 8), "b": entry(8, 16)}
    write_safetensors(tmp_path, header)
    (file,) = find_weights(tmp_path)
    begin = 8 + len(json.dumps(header))
    assert {name: tensor.offset - begin for name, tensor in file.tensors.items()} == {"a": 0, "b": 8}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 12)}, "of another length than its shape"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, "overlap"),
        ({"a": entry(-8, 0)}, "a place that no tensor has"),
        ({"a": entry(12, 20)}, "cut short"),
        ({"a": {"dtype": "F32"}}, "is no safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tmp_path: Path, header: dict[str, Any], words: str
) -> None:
    write_safetensors(tmp_path, header)
    with pytest.raises(CheckpointError, match=words):
        find_weights(tmp_path)


def test_a_header_has_six_mebibytes_at_most_and_lies_within_the_file(tmp_path: Path) -> None:
    path, most = tmp_path / "model.safetensors", 6 << 20
    path.write_bytes(most.to_bytes(8, "little") + b"{}" + b" " * (most - 2))
    assert find_weights(tmp_path) == [(path, {})]
    path.write_bytes((most + 1).to_bytes(8, "little") + b"{}" + b" " * (most - 1))
    with pytest.raises(CheckpointError, match="its header is larger than 6291456 bytes"):
        find_weights(tmp_path)
    path.write_bytes((3).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="is cut short: fetch it again"):
        find_weights(tmp_path)


def test_a_pointer_of_git_is_no_weights_and_a_pickled_file_is_read_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"PK")
    assert find_weights(tmp_path) == [(path, {})]
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="only a pointer to the weights: run `git lfs pull` there"):
        find_weights(tmp_path)


def test_an_index_leads_to_each_file_once(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"a": entry(0, 8)})
    for name in ("x-1.safetensors", "x-2.safetensors"):
        (tmp_path / name).write_bytes((tmp_path / "model.safetensors").read_bytes())
    places = {"b": "x-2.safetensors", "a": "x-1.safetensors", "c": "x-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert [file.path.name for file in find_weights(tmp_path)] == ["x-1.safetensors", "x-2.safetensors"]


def test_without_weights_the_files_that_would_do_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors, .* nor pytorch_model\.bin"):
        find_weights(tmp_path)


def test_an_index_names_files_beside_it_alone(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for wrong in (
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": ["a"]}',
    ):
        index.write_text(wrong)
        with pytest.raises(CheckpointError, match=r"must name \.safetensors files beside it"):
            find_weights(tmp_path)


def test_noted_tensors_are_read_again_until_their_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(100))
    tensors = {"a": StoredTensor("I8", (4, 5), 20, StoredTensor("F32", (4,), 80))}
    write_stored(tmp_path, file, tensors, revision="abc")
    assert read_stored(tmp_path) == (file, tensors)
    assert find_weights(tmp_path) == [(file, tensors)]
    file.write_bytes(bytes(101))
    with pytest.raises(CheckpointError, match="has changed since the server was started"):
        read_stored(tmp_path)


def test_a_damaged_note_says_what_to_remove(tmp_path: Path) -> None:
    (tmp_path / "stored_tensors.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"is damaged: remove {tmp_path}"):
        read_stored(tmp_path)
