"""Other programs' names and files: translated, or refused with what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.checkpoint.foreign import (
    ForeignModel,
    check_foreign_file,
    explain_listing,
    hugging_face_name,
    is_ctranslate2,
)
from asr_server.checkpoint.tensors import StoredTensor, StoredTensors
from asr_server.errors import CheckpointError


@pytest.mark.parametrize(
    ("name", "translated"),
    [
        ("encoder.blocks.0.attn_ln.weight", "encoder.layers.0.self_attn_layer_norm.weight"),
        ("decoder.blocks.1.cross_attn.key.weight", "decoder.layers.1.encoder_attn.k_proj.weight"),
        ("decoder.blocks.1.cross_attn_ln.bias", "decoder.layers.1.encoder_attn_layer_norm.bias"),
        ("encoder.blocks.3.mlp.0.bias", "encoder.layers.3.fc1.bias"),
        ("encoder.blocks.3.mlp_ln.bias", "encoder.layers.3.final_layer_norm.bias"),
        ("encoder.ln_post.weight", "encoder.layer_norm.weight"),
        ("decoder.ln.weight", "decoder.layer_norm.weight"),
        ("decoder.positional_embedding", "decoder.embed_positions.weight"),
    ],
)
def test_a_name_of_openai_whisper_is_hugging_faces(name: str, translated: str) -> None:
    assert hugging_face_name(name) == translated


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.bin", "vocabulary.txt"], "has no config.json"),
        (["model.safetensors"], "has no config.json"),
        (["ggml-small.bin", "ggml-base.bin"], "such as ggml-base.bin: fetch one"),
        (["tiny.pt"], "such as tiny.pt"),
        (["whisper-small.gguf"], "holds GGUF models. Use the model that it was made from: small"),
        (["weights.npz"], "is an MLX model"),
    ],
)
def test_a_listing_that_cannot_be_served_says_what_to_do(files: list[str], words: str) -> None:
    assert words in str(explain_listing("someone/whisper-small", files))


@pytest.mark.parametrize(
    "files",
    [
        ["config.json", "model.safetensors", "ggml-base.bin"],
        ["config.json", "model.bin", "vocabulary.json"],
        ["config.json", "pytorch_model.bin"],
        ["config.json"],
    ],
)
def test_a_listing_that_may_be_served_needs_no_word(files: list[str]) -> None:
    assert explain_listing("x", files) is None


def test_a_model_of_ctranslate2_has_weights_and_a_vocabulary() -> None:
    assert is_ctranslate2(["vocabulary.json", "model.bin"])
    assert not is_ctranslate2(["model.bin"])
    assert not is_ctranslate2(["vocabulary.txt"])


def test_a_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    for begins, words in ((b"GGUF", "is a GGUF model"), (b"text", "is no model")):
        path.write_bytes(begins + bytes(10))
        with pytest.raises(CheckpointError, match=words):
            check_foreign_file(path)
    for begins in (b"lmgg", b"PK\x03\x04"):
        path.write_bytes(begins)
        check_foreign_file(path)


def tensors_of(num_layers: int) -> StoredTensors:
    shapes = {
        "encoder.conv1.weight": (128, 80, 3),
        "encoder.embed_positions.weight": (1500, 128),
        "decoder.embed_tokens.weight": (51_865, 128),
        "decoder.embed_positions.weight": (448, 128),
    }
    for part in ("encoder", "decoder"):
        shapes |= {f"{part}.layers.{layer}.fc1.weight": (512, 128) for layer in range(num_layers)}
    return {name: StoredTensor("F32", shape, 0) for name, shape in shapes.items()}


def test_sizes_are_those_of_the_tensors_where_the_file_states_none() -> None:
    config = ForeignModel(Path("x"), tensors_of(3), encoder_heads=0, decoder_heads=4).config()
    assert (config["d_model"], config["num_mel_bins"], config["vocab_size"]) == (128, 80, 51_865)
    assert (config["encoder_layers"], config["encoder_attention_heads"]) == (3, 2)
    assert config["decoder_layers"] == 3
    assert (config["decoder_attention_heads"], config["decoder_ffn_dim"]) == (4, 512)
    assert (config["max_source_positions"], config["max_target_positions"]) == (1500, 448)


def test_a_model_without_a_tensor_that_gives_a_size_is_no_whisper_model() -> None:
    with pytest.raises(CheckpointError, match=r"'encoder\.layers\.0\.fc1\.weight' is missing"):
        ForeignModel(Path("x"), tensors_of(0), 2, 2).config()
