"""Checks that a checkpoint's weights are there whole and fit its config.json, by the files' headers alone.

Used by `files.py`, so that a wrong size is told in a line rather than by an engine that cannot start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.json_files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"

_GIT_LFS = b"version https://git-lfs"
Shapes = dict[str, list[int]]


def check_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a file is missing or cut short, or the weights are of other sizes."""
    shapes: Shapes = {}
    for file in _weight_files(directory):
        shapes |= _check_file(directory / file)
    if not shapes:
        return  # pickled: only loading tells what is in it
    for name, expected in _expected_shapes(config, directory):
        shape = shapes.get(f"model.{name}", shapes.get(name))
        if shape != expected:
            found = f"is {shape}" if shape else "is missing"
            raise CheckpointError(
                f"the weights in {directory} do not fit its config.json: {name} {found}, not {expected}"
            )


def _weight_files(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
    for name in (SINGLE, PICKLED):
        if (directory / name).exists():
            return [name]
    raise CheckpointError(f"{directory} has no weights: neither {SINGLE}, {INDEX} nor {PICKLED}")


def _check_file(path: Path) -> Shapes:
    """The shapes of its tensors; none for a pickled file, which has no header."""
    try:
        with path.open("rb") as file:
            if file.read(len(_GIT_LFS)) == _GIT_LFS:
                raise CheckpointError(f"{path} is only a pointer to the weights: run `git lfs pull` there")
        return _read_header(path) if path.suffix == ".safetensors" else {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_header(path: Path) -> Shapes:
    """Of a safetensors file: eight bytes of length, a JSON object, the tensors."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            tensors = json.loads(file.read(length)) if length < num_bytes else None
            if tensors is not None:
                tensors.pop("__metadata__", None)
                ends = [tensor["data_offsets"][1] for tensor in tensors.values()]
                shapes = {name: tensor["shape"] for name, tensor in tensors.items()}
        except (ValueError, TypeError, KeyError, AttributeError, LookupError) as error:
            raise CheckpointError(f"{path} is no safetensors file: fetch it again") from error
    if tensors is None or num_bytes < 8 + length + max(ends, default=0):
        raise CheckpointError(f"{path} is cut short: fetch it again")
    return shapes


def _expected_shapes(config: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, list[int]]]:
    """A few weights that together tell every size."""
    try:
        width = config["d_model"]
        yield "encoder.conv1.weight", [width, config["num_mel_bins"], 3]
        yield "decoder.embed_tokens.weight", [config["vocab_size"], width]
        yield "encoder.embed_positions.weight", [config.get("max_source_positions", 1500), width]
        yield "decoder.embed_positions.weight", [config.get("max_target_positions", 448), width]
        for part in ("encoder", "decoder"):
            last = f"{part}.layers.{config[f'{part}_layers'] - 1}"
            yield f"{last}.fc1.weight", [config[f"{part}_ffn_dim"], width]
    except KeyError as error:
        raise CheckpointError(f"{directory / 'config.json'} lacks {error}") from error
    except TypeError as error:
        raise CheckpointError(f"{directory / 'config.json'} has a size that is no number") from error
