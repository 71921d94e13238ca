"""Check that the tensors are exactly those that config.json describes.

A surplus layer, an own projection or a foreign scale would change the text silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asr_server.checkpoint.tensors import find_weights
from asr_server.errors import CheckpointError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # by Hugging Face's names, without the leading `model.`

PROJECTION: Final = "proj_out.weight"
EMBEDDING: Final = "decoder.embed_tokens.weight"
_PARTS: Final = ("encoder", "decoder")
_OF_THE_MODEL: Final = ("encoder.", "decoder.", "proj_out.")  # other names are of other uses
_DEFAULTS: Final = {"max_source_positions": 1500, "max_target_positions": 448}
_SIZES: Final = (
    *("d_model", "num_mel_bins", "vocab_size", "max_source_positions", "max_target_positions"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
)


def check_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a file is missing or cut short, or the weights are another model's."""
    tensors = {
        name: tensor.shape for file in find_weights(directory) for name, tensor in file.tensors.items()
    }
    if tensors:
        check_layout(tensors, config, directory)
    else:
        _checked_sizes(config, directory)  # pickled: only loading shows the tensors


def check_layout(shapes: Shapes, config: Mapping[str, Any], directory: Path) -> None:
    """Raise CheckpointError if a tensor is missing, surplus or of another shape."""
    sizes = _checked_sizes(config, directory)
    is_tied = config.get("tie_word_embeddings", True) is not False
    if problem := next(_contradictions(shapes, sizes, is_tied), None):
        raise CheckpointError(f"the weights in {directory} do not fit its config.json: {problem}")


def _checked_sizes(config: Mapping[str, Any], directory: Path) -> dict[str, int]:
    path = directory / "config.json"
    try:
        sizes = {
            name: _DEFAULTS[name] if name in _DEFAULTS and name not in config else config[name]
            for name in _SIZES
        }
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from error
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{name} in {path} is {str(size)[:80]}: must be a whole number from 1 on")
    for part in _PARTS:
        if sizes["d_model"] % (num_heads := sizes[f"{part}_attention_heads"]):
            raise CheckpointError(
                f"{part}_attention_heads in {path} is {num_heads}: must divide d_model, {sizes['d_model']}"
            )
    return sizes


def _contradictions(shapes: Shapes, sizes: Mapping[str, int], is_tied: bool) -> Iterator[str]:
    for part in _PARTS:
        found, stated = _num_layers(shapes, part), sizes[f"{part}_layers"]
        if found != stated:
            yield f"they have {found} {part} layers, {part}_layers is {stated}"
    expected = dict(_expected(sizes))
    for name, shape in expected.items():
        if name not in shapes:
            yield f"{name} is missing, not {list(shape)}"
        elif tuple(shapes[name]) != shape:
            yield f"{name} is {list(shapes[name])}, not {list(shape)}"
    for name in shapes:
        if name.startswith(_OF_THE_MODEL) and name not in expected and name != PROJECTION:
            yield f"{name[:200]} is no part of a Whisper model"
    if not is_tied and PROJECTION not in shapes:
        yield f"tie_word_embeddings is false, and {PROJECTION} is missing"


def _num_layers(shapes: Shapes, part: str) -> int:
    matches = (re.match(rf"{part}\.layers\.(\d+)\.", name) for name in shapes)
    return len({match[1] for match in matches if match})


def _expected(sizes: Mapping[str, int]) -> Iterator[tuple[str, Shape]]:
    width = sizes["d_model"]
    yield from _linear("encoder.conv1", width, sizes["num_mel_bins"], 3)
    yield from _linear("encoder.conv2", width, width, 3)
    yield "encoder.embed_positions.weight", (sizes["max_source_positions"], width)
    yield EMBEDDING, (sizes["vocab_size"], width)
    yield "decoder.embed_positions.weight", (sizes["max_target_positions"], width)
    for part in _PARTS:
        yield from _norm(f"{part}.layer_norm", width)
        attentions = ("self_attn",) if part == "encoder" else ("self_attn", "encoder_attn")
        for layer in range(sizes[f"{part}_layers"]):
            yield from _layer(f"{part}.layers.{layer}", attentions, width, sizes[f"{part}_ffn_dim"])


def _layer(prefix: str, attentions: tuple[str, ...], width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    for attention in attentions:
        for name in ("q_proj", "v_proj", "out_proj"):
            yield from _linear(f"{prefix}.{attention}.{name}", width, width)
        yield f"{prefix}.{attention}.k_proj.weight", (width, width)  # keys have no bias
        yield from _norm(f"{prefix}.{attention}_layer_norm", width)
    yield from _linear(f"{prefix}.fc1", hidden, width)
    yield from _linear(f"{prefix}.fc2", width, hidden)
    yield from _norm(f"{prefix}.final_layer_norm", width)


def _linear(prefix: str, *shape: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", shape
    yield f"{prefix}.bias", shape[:1]


def _norm(prefix: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.weight", (width,)
    yield f"{prefix}.bias", (width,)
