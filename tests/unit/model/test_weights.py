"""A directory in Hugging Face's layout, made of models in other programs' formats."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from whisper.model import Whisper as Reference

from asr_server.annexes.model_sources.convert import convert
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.checkpoint.tensors import StoredTensor, WeightsFile
from asr_server.cli import main
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from asr_server.model import load_whisper
from asr_server.model.products import Linear
from asr_server.model.weights import StoredWeights, read_weights
from tests.support.checkpoints import pocket_directory
from tests.unit.checkpoint.foreign_models import random_reference, write_ctranslate2, write_ggml, write_openai
from tests.unit.model.test_whisper import CLIPS, TOKENS, our_logits


@pytest.fixture(scope="module")
def reference() -> Reference:
    return random_reference()


@pytest.fixture
def openai_file(reference: Reference, tmp_path: Path) -> Path:
    return write_openai(reference, tmp_path / "my-small.pt")


def logits_are_the_same(directory: Path, reference: Reference) -> None:
    """Our engine's model of the directory, against openai-whisper's own on the same audio and tokens."""
    ours = load_whisper(directory, "cpu", torch.float32)
    with torch.inference_mode():
        expected = reference(ours.log_mel(CLIPS), TOKENS)
    torch.testing.assert_close(our_logits(ours, one_by_one=False), expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_openai_whisper_is_the_same_model_for_whom_the_umask_lets_read_it(
    openai_file: Path, reference: Reference, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "mine"
    arguments = ["convert", str(openai_file), str(target), "--tokenizer", str(pocket_directory())]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert resolve_checkpoint(str(target)) == target
    logits_are_the_same(target, reference)
    (tmp_path / "touched").touch()
    ordinary = stat.S_IMODE((tmp_path / "touched").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()} == {ordinary}, "as umask lets it"


def test_a_ctranslate2_model_is_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    source = write_ctranslate2(pocket_directory(), tmp_path / "ct2")
    convert(source, tmp_path / "back")
    back, before = (load_file(each / "model.safetensors") for each in (tmp_path / "back", pocket_directory()))
    assert set(back) == set(before) - {"proj_out.weight"}
    assert all(torch.equal(back[name], before[name].float()) for name in back)


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    source = write_ctranslate2(pocket_directory(), tmp_path / "ct2")
    (source / "preprocessor_config.json").unlink(missing_ok=True)  # few have one
    convert(source, tmp_path / "back")
    model: Any = WhisperForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert model.generation_config.lang_to_id["<|de|>"] == 50261
    extractor = WhisperProcessor.from_pretrained(tmp_path / "back").feature_extractor
    features = extractor(np.zeros(16_000), sampling_rate=16_000, return_attention_mask=True).input_features
    assert np.shape(features) == (1, 80, 3000)


def test_quantized_weights_are_refused(reference: Reference, tmp_path: Path) -> None:
    source = write_ggml(reference, tmp_path / "ggml-mine-q5_0.bin", kind=6)
    with pytest.raises(CheckpointError, match="is quantized"):
        convert(source, tmp_path / "mine", str(pocket_directory()))
    assert not (tmp_path / "mine").exists()


def test_what_is_no_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("array.npy", "missing.pt"):
        done = CliRunner().invoke(main, ["convert", str(tmp_path / name), str(tmp_path / "mine")])
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["array.npy"]


def test_an_existing_directory_is_left_as_it_is(openai_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there already"):
        convert(openai_file, tmp_path, str(pocket_directory()))


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
