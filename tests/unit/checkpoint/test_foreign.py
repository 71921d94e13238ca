"""Other programs' names and files: translated, or refused with what to use instead."""

from __future__ import annotations

import pytest

from asr_server.annexes.model_sources.foreign import (
    explain_listing,
    hugging_face_name,
)
from asr_server.checkpoint.tensors import StoredTensor, StoredTensors


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
