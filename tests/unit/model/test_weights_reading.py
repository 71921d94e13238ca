"""Weights as they lie in a checkpoint's files, and which kinds of products they are loaded into."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from asr_server.checkpoint.tensors import StoredTensor, WeightsFile
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from asr_server.model import load_whisper
from asr_server.model.products import Linear
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
