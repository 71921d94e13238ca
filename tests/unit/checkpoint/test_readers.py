"""Tensors, names and sizes in the files of CTranslate2 and whisper.cpp."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from asr_server.annexes.model_sources.readers import read_ctranslate2, read_ggml
from tests.unit.checkpoint.binary_models import ctranslate2, ggml, ggml_tensor, text, variable

ATTENTION = "encoder/layer_0/self_attention/linear_0"
CROSS = "decoder/layer_1/attention/linear_1"
EMBEDDING = "decoder/embeddings/weight"
BYTE, FLOAT = 1, 0  # CTranslate2's numbers of types


def numbers(*shape: int) -> bytes:
    return np.arange(np.prod(shape), dtype="<f4").tobytes()


def write_model(path: Path, variables: list[bytes], second_names: tuple[tuple[str, str], ...]) -> Path:
    pairs = b"".join(text(alias) + text(name) for alias, name in second_names)
    end = struct.pack("<I", len(second_names)) + pairs
    path.write_bytes(ctranslate2(b"".join(variables), len(variables), end=end))
    return path


def test_rows_that_ctranslate2_stacks_are_found_with_their_scales(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model.bin",
        [
            variable(f"{ATTENTION}/weight", (6, 2), bytes(range(12)), BYTE),
            variable(f"{ATTENTION}/weight_scale", (6,), numbers(6)),
            variable(f"{ATTENTION}/bias", (6,), numbers(6)),
            variable(f"{CROSS}/weight", (4, 2), numbers(4, 2)),
            variable("encoder/num_heads", (), b"\x05", BYTE),
        ],
        (("decoder/num_heads", "encoder/num_heads"), ("absent", "nowhere")),
    )
    model = read_ctranslate2(path)
    content = path.read_bytes()
    assert (model.encoder_heads, model.decoder_heads) == (5, 5)
    attention, cross = "encoder.layers.0.self_attn", "decoder.layers.1.encoder_attn"
    assert set(model.tensors) == {
        *(f"{attention}.{name}_proj.weight" for name in "qkv"),
        *(f"{attention}.{name}_proj.bias" for name in "qv"),
        *(f"{cross}.{name}_proj.weight" for name in "kv"),
    }
    values = model.tensors[f"{attention}.v_proj.weight"]
    assert content[values.offset : values.end] == bytes(range(8, 12))
    assert values.scale is not None
    assert content[values.scale.offset : values.scale.end] == numbers(6)[16:]
    bias = model.tensors[f"{attention}.v_proj.bias"]
    assert content[bias.offset : bias.end] == numbers(6)[16:]
    cross_values = model.tensors[f"{cross}.v_proj.weight"]
    assert content[cross_values.offset : cross_values.end] == numbers(4, 2)[16:]


@pytest.mark.parametrize(
    ("more", "second_names", "unknown"),
    [
        ([], (("decoder/projection/weight", EMBEDDING),), set()),
        ([variable("decoder/projection/weight", (2, 1), numbers(2))], (), {"proj_out.weight"}),
        ([variable("decoder/new/weight", (2, 1), numbers(2))], (), {"decoder.new.weight"}),
        ([variable("decoder/flag", (), b"\1", BYTE)], (), set()),
        ([variable(f"{EMBEDDING}_scale", (2,), numbers(2))], (), set()),
    ],
)
def test_what_has_no_place_in_the_model_is_kept_to_be_refused(
    tmp_path: Path, more: list[bytes], second_names: tuple[tuple[str, str], ...], unknown: set[str]
) -> None:
    variables = [variable(EMBEDDING, (2, 1), numbers(2)), *more]
    model = read_ctranslate2(write_model(tmp_path / "model.bin", variables, second_names))
    assert set(model.tensors) - {"decoder.embed_tokens.weight"} == unknown


WORDS = (2, 3, *(0,) * 6, 1, 4, 0)  # filters of 2 by 3, and one word of four bytes


def test_tensors_of_whisper_cpp_are_found_behind_filters_and_words(tmp_path: Path) -> None:
    path = tmp_path / "ggml-x.bin"
    path.write_bytes(
        ggml(*WORDS, sizes=range(100, 111))
        + ggml_tensor("encoder.conv1.bias", (4, 1), numbers(4))
        + ggml_tensor("decoder.blocks.0.attn.query.weight", (2, 3), bytes(range(12)), kind=1)
    )
    model = read_ggml(path)
    assert (model.encoder_heads, model.encoder_layers) == (103, 104)
    assert (model.decoder_heads, model.decoder_layers) == (107, 108)
    bias = model.tensors["encoder.conv1.bias"]
    query = model.tensors["decoder.layers.0.self_attn.q_proj.weight"]
    assert ((bias.dtype, bias.shape), (query.dtype, query.shape)) == (("F32", (4,)), ("F16", (2, 3)))
    content = path.read_bytes()
    assert content[bias.offset : bias.end] == numbers(4)
    assert content[query.offset : query.end] == bytes(range(12))


NAME = "a" * 256
ONE = ggml(*WORDS)
