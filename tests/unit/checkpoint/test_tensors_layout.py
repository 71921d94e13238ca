"""Weights that contradict the model that config.json describes are refused by name, never read in part."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from whisper.model import Whisper as Reference

from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.checkpoint.files import read_json
from asr_server.checkpoint.tensors import check_layout, find_weights
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from asr_server.model import load_whisper
from tests.support.checkpoints import pocket_directory
from tests.unit.checkpoint.foreign_models import random_reference, write_ctranslate2, write_ggml, write_openai
from tests.unit.checkpoint.test_find import change_config

EMBEDDING, PROJECTION = "model.decoder.embed_tokens.weight", "proj_out.weight"
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(pocket_directory(), tmp_path / "model")


def change_weights(directory: Path, change: Change) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def refusal(path: Path) -> str:
    """The line that refuses it, before a start or at the latest where the weights are read."""
    with pytest.raises(CheckpointError) as caught:
        load_whisper(resolve_checkpoint(str(path)), "cpu", torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("num_layers", [1, 3, 3_000_000])
def test_a_config_of_other_layers_is_refused(directory: Path, part: str, num_layers: int) -> None:
    change_config(directory, **{f"{part}_layers": num_layers})
    assert f"they have 2 {part} layers, {part}_layers is {num_layers}" in refusal(directory)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.encoder_attn.q_proj.lora_A.weight",
        "decoder.project_in.weight",
        "proj_out.bias",
        "decoder.layers.0.fc1.weight_scale",
    ],
)
def test_a_tensor_that_is_no_part_of_the_model_is_named(directory: Path, name: str) -> None:
    change_weights(directory, lambda weights: weights.update({f"model.{name}": torch.ones(3)}))
    assert f"{name} is no part of a Whisper model" in refusal(directory)


def test_any_missing_tensor_is_named_before_a_start(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop("model.decoder.layers.0.encoder_attn.v_proj.bias"))
    with pytest.raises(CheckpointError, match=r"layers\.0\.encoder_attn\.v_proj\.bias is missing"):
        resolve_checkpoint(str(directory))


def test_a_projection_of_its_own_is_refused(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.update({PROJECTION: weights[EMBEDDING] + 1}))
    assert "have an output projection of their own (proj_out.weight)" in refusal(directory)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_projection_that_is_the_embedding_is_served(directory: Path, is_tied: bool) -> None:
    change_weights(directory, lambda weights: weights.update({PROJECTION: weights[EMBEDDING].clone()}))
    change_config(directory, tie_word_embeddings=is_tied)
    load_whisper(resolve_checkpoint(str(directory)), "cpu", torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_float8_are_read(directory: Path, dtype: torch.dtype) -> None:
    before = load_file(directory / "model.safetensors")
    change_weights(directory, lambda weights: weights.update({k: t.to(dtype) for k, t in weights.items()}))
    model = load_whisper(resolve_checkpoint(str(directory)), "cpu", torch.float32)
    expected = before["model.decoder.layers.0.encoder_attn.k_proj.weight"].to(dtype).float()
    assert torch.equal(model.decoder.state_dict()["layers.0.cross_key"], expected)


def test_an_untied_model_without_its_projection_is_refused(directory: Path) -> None:
    change_weights(directory, lambda weights: weights.pop(PROJECTION, None))
    change_config(directory, tie_word_embeddings=False)
    assert "tie_word_embeddings is false, and proj_out.weight is missing" in refusal(directory)


def test_pickled_weights_are_checked_too(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    load_whisper(resolve_checkpoint(str(directory)), "cpu", torch.float32)
    change_config(directory, encoder_layers=1)
    assert "they have 2 encoder layers, encoder_layers is 1" in refusal(directory)


def test_a_ctranslate2_model_with_a_projection_of_its_own_is_refused(directory: Path, tmp_path: Path) -> None:
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.specs import WhisperSpec

    class Untied(TransformersConverter):  # type: ignore[misc]
        def _load(self) -> WhisperSpec:
            spec = super()._load()
            spec.decoder.projection.weight = spec.decoder.projection.weight + 1
            return spec

    write_ctranslate2(pocket_directory(), tmp_path / "tied")
    Untied(str(directory), copy_files=["tokenizer.json"]).convert(str(tmp_path / "untied"))
    load_whisper(resolve_checkpoint(str(tmp_path / "tied")), "cpu", torch.float32)
    assert "have an output projection of their own (proj_out.weight)" in refusal(tmp_path / "untied")


@pytest.fixture
def without_a_layer() -> Reference:
    """openai-whisper's model, whose sizes state a layer more than it has."""
    reference = random_reference()
    del reference.decoder.blocks[1]
    return reference


@pytest.mark.parametrize(("write", "name"), [(write_openai, "mine.pt"), (write_ggml, "ggml-mine.bin")])
def test_a_file_without_a_layer_is_refused(
    without_a_layer: Reference, tmp_path: Path, write: Callable[[Reference, Path], Path], name: str
) -> None:
    message = refusal(write(without_a_layer, tmp_path / name))
    assert "they have 1 decoder layers, decoder_layers is 2" in message


@pytest.mark.parametrize(
    ("name", "size"), [("encoder_attention_heads", 0), ("decoder_layers", 2.0), ("d_model", "128")]
)
def test_a_size_that_is_no_whole_number_is_named(directory: Path, name: str, size: object) -> None:
    change_config(directory, **{name: size})
    message = refusal(directory)
    assert f"{name} in {directory / 'config.json'} is {size!r}: must be a whole number from 1 on" in message


def test_heads_that_do_not_divide_the_width_are_named(directory: Path) -> None:
    change_config(directory, encoder_attention_heads=3)
    assert "encoder_attention_heads in " in refusal(directory)


def test_a_tokenizer_of_fewer_languages_than_the_model_has_is_refused(directory: Path) -> None:
    """Each time would be read 20 ms later: the first of them names a language."""
    change_config(directory, vocab_size=51866)
    with pytest.raises(CheckpointError, match="has 51865 tokens, the model 51866: it belongs to another"):
        Tokenizer.from_directory(directory)


def test_each_tensor_of_a_model_has_its_place_and_its_shape() -> None:
    config = read_json(EMBEDDED_MODEL / "config.json")
    (file,) = find_weights(EMBEDDED_MODEL)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    for name in shapes.keys() - {PROJECTION}:
        changed = shapes | {name: (*shapes[name][:-1], shapes[name][-1] + 1)}
        with pytest.raises(CheckpointError, match="do not fit its config") as caught:
            check_layout(changed, config, EMBEDDED_MODEL)
        assert f"{name} is {list(changed[name])}, not {list(shapes[name])}" in str(caught.value)


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
