"""Weights as they lie in a checkpoint's files, and which kinds of products they are loaded into."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asr_server.checkpoint.tensors import EMBEDDING, PROJECTION, StoredTensor, WeightsFile
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from asr_server.model import load_whisper, weights
from asr_server.model.layers import Linear
from asr_server.model.weights import StoredWeights, read_weights

KINDS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


def stored(path: Path, tensors: dict[str, tuple[Tensor, StoredTensor]]) -> StoredWeights:
    """Write numbers where their descriptions say."""
    content = bytearray(4096)
    for numbers, place in tensors.values():
        raw = numbers.reshape(-1).view(torch.uint8).numpy().tobytes()
        content[place.offset : place.offset + len(raw)] = raw
    path.write_bytes(content)
    return StoredWeights([WeightsFile(path, {name: place for name, (_, place) in tensors.items()})])


def test_tensors_of_every_kind_are_read_wherever_they_lie(tmp_path: Path) -> None:
    numbers = torch.tensor([[1, 2, 3], [4, 5, 6]])
    places = {
        name: (numbers.to(kind), StoredTensor(name, (2, 3), 200 * place + place % 3))
        for place, (name, kind) in enumerate(KINDS.items())
    }
    found = stored(tmp_path / "a", places)
    for name, kind in KINDS.items():
        assert found[name].dtype == kind
        assert torch.equal(found[name], numbers.to(kind))
        assert found[name].data_ptr() % kind.itemsize == 0, "processors read no others, or slowly"
    assert found.shapes() == dict.fromkeys(KINDS, (2, 3))
    assert (list(found), len(found)) == (list(KINDS), len(KINDS))
    assert "F32" in found
    assert "f32" not in found


@pytest.mark.parametrize(("name", "kind"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_8_bit_floats_are_read_as_bfloat16(name: str, kind: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.tensor([1.5, -2.0, 0.25]).to(kind)
    found = stored(tmp_path / "a", {"x": (numbers, StoredTensor(name, (3,), 7))})["x"]
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, -2.0, 0.25]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 1)])
def test_integers_are_divided_by_the_scale_of_their_row_or_of_all(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    numbers = torch.tensor([1, 2, 3, 40, 50, 60], dtype=torch.int8)
    of_rows, of_all = StoredTensor("F32", (2,), 100), StoredTensor("F32", (), 200)
    tensors = {
        "rows": (numbers, StoredTensor("I8", shape, 0, of_rows)),
        "all": (numbers, StoredTensor("I8", shape, 0, of_all)),
        "one": (torch.tensor([2.0, 10.0]), of_rows),
        "two": (torch.tensor(4.0), of_all),
    }
    found = stored(tmp_path / "a", tensors)
    assert found["rows"].flatten().tolist() == [0.5, 1.0, 1.5, 4.0, 5.0, 6.0]
    assert found["all"].flatten().tolist() == [0.25, 0.5, 0.75, 10.0, 12.5, 15.0]
    assert found["rows"].shape == shape
    assert found["rows"].dtype == torch.float32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")


def own_weights(directory: Path) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in read_weights(directory).items()}


def replace_weights(directory: Path, tensors: dict[str, Tensor], pickled: bool = False) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    if pickled:
        torch.save(named, directory / "pytorch_model.bin")
    else:
        save_file(named, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("pickled", [False, True])
def test_names_are_without_the_leading_model(pickled: bool, directory: Path) -> None:
    before = own_weights(directory)
    replace_weights(directory, before, pickled)
    found = read_weights(directory)
    assert set(found) == set(before)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    assert isinstance(found, StoredWeights) is not pickled
    model = load_whisper(directory, "cpu", torch.float32)
    assert torch.equal(model.encoder.positions, before["encoder.embed_positions.weight"].float())
    assert type(model.encoder.layers[0].qkv) is type(model.decoder.layers[0].qkv) is Linear


def test_files_of_torch_before_1_6_are_read(directory: Path) -> None:
    before = own_weights(directory)
    replace_weights(directory, {})
    (directory / "model.safetensors").unlink()
    torch.save(before, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = read_weights(directory)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


class Runs:
    """Pickled, it makes a directory where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_pickle_runs_nothing(is_zip: bool, directory: Path, tmp_path: Path) -> None:
    replace_weights(directory, {})
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    torch.save({"a": Runs(tmp_path / "ran")}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError):
        load_whisper(directory, "cpu", torch.float32)
    assert not (tmp_path / "ran").exists()


def test_pickles_are_checked_before_torch_reads_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small archive torch would make gigabytes."""
    replace_weights(directory, own_weights(directory), pickled=True)
    checked: list[Path] = []
    monkeypatch.setattr(weights, "check_pickled", checked.append)
    read_weights(directory)
    assert checked == [directory / "pytorch_model.bin"]


def test_weights_of_other_sizes_than_those_of_config_json_are_refused(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder_ffn_dim": 1024}))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_whisper(directory, "cpu", torch.float32)


def test_weights_that_are_damaged_are_to_be_fetched_again(directory: Path) -> None:
    replace_weights(directory, own_weights(directory), pickled=True)
    path = directory / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"damaged: fetch them again|cut short|damaged"):
        load_whisper(directory, "cpu", torch.float32)


@pytest.mark.parametrize("is_own", [False, True])
def test_an_output_projection_of_its_own_is_refused(is_own: bool, directory: Path) -> None:
    tensors = own_weights(directory)
    projection = tensors[EMBEDDING].to(torch.float16) if not is_own else tensors[EMBEDDING] + 1
    replace_weights(directory, tensors)
    named = load_file(directory / "model.safetensors") | {PROJECTION: projection}
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    if is_own:
        with pytest.raises(CheckpointError, match="have an output projection of their own"):
            load_whisper(directory, "cpu", torch.float32)
    else:
        load_whisper(directory, "cpu", torch.float32)
