"""Each tensor of a model has its place and its shape: on those of the embedded model, changed one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asr_server.checkpoint.files import read_json
from asr_server.checkpoint.layout import EMBEDDING, PROJECTION, check_layout, check_weights
from asr_server.checkpoint.tensors import find_weights
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError

CONFIG = read_json(EMBEDDED_MODEL / "config.json")
(WEIGHTS,) = find_weights(EMBEDDED_MODEL)
SHAPES = {name: tensor.shape for name, tensor in WEIGHTS.tensors.items()}
FOLDER = Path("folder")


def refusal(shapes: dict[str, tuple[int, ...]], **config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_layout(shapes, CONFIG | config, FOLDER)
    return str(caught.value)


def test_the_tensors_of_a_model_are_all_that_it_needs() -> None:
    check_layout(SHAPES, CONFIG, FOLDER)
    check_weights(EMBEDDED_MODEL, CONFIG)
    with pytest.raises(CheckpointError, match="do not fit its config"):
        check_weights(EMBEDDED_MODEL, CONFIG | {"decoder_layers": 9})
    own = sorted(name for name in SHAPES if name != PROJECTION)
    for name in own:
        if ".layers." not in name or name.endswith("k_proj.weight"):
            others = {other: shape for other, shape in SHAPES.items() if other != name}
            assert f"do not fit its config.json: {name} is missing, not [" in refusal(others)
        changed = SHAPES | {name: (*SHAPES[name][:-1], SHAPES[name][-1] + 1)}
        assert f"{name} is {list(changed[name])}, not {list(SHAPES[name])}" in refusal(changed)


@pytest.mark.parametrize(
    ("part", "change"), [("encoder", 1), ("encoder", -1), ("decoder", 1), ("decoder", -1)]
)
def test_layers_are_counted_on_both_sides(part: str, change: int) -> None:
    found = CONFIG[f"{part}_layers"]
    message = refusal(SHAPES, **{f"{part}_layers": found + change})
    assert f"they have {found} {part} layers, {part}_layers is {found + change}" in message


@pytest.mark.parametrize("name", ["encoder.extra", "decoder.layers.0.fc1.weight_scale", "proj_out.bias"])
def test_a_tensor_of_another_make_is_refused_by_its_name(name: str) -> None:
    assert f"{name} is no part of a Whisper model" in refusal(SHAPES | {name: (1,)})


def test_long_names_and_sizes_are_told_in_part() -> None:
    name = f"encoder.{'x' * 200}"
    assert f": {name[:200]} is no part of a Whisper model" in refusal(SHAPES | {name: (1,)})
    assert f"is {'9' * 80}: must be" in refusal(SHAPES, decoder_layers="9" * 81)


def test_a_tensor_of_another_use_is_left_alone() -> None:
    check_layout(SHAPES | {"classifier.weight": (1,)}, CONFIG, FOLDER)


def test_a_projection_is_needed_where_it_is_not_the_embedding() -> None:
    without = {name: shape for name, shape in SHAPES.items() if name != PROJECTION}
    check_layout(without, CONFIG | {"tie_word_embeddings": True}, FOLDER)
    check_layout(without, {k: v for k, v in CONFIG.items() if k != "tie_word_embeddings"}, FOLDER)
    check_layout(without | {PROJECTION: SHAPES[EMBEDDING]}, CONFIG | {"tie_word_embeddings": False}, FOLDER)
    message = refusal(without, tie_word_embeddings=False)
    assert "tie_word_embeddings is false, and proj_out.weight is missing" in message


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", True])
def test_a_size_is_a_whole_number_from_1_on(size: object) -> None:
    message = refusal(SHAPES, decoder_layers=size)
    assert f"decoder_layers in folder/config.json is {size}: must be a whole number from 1 on" in message


def test_sizes_that_whisper_has_by_default_may_be_left_out_and_no_others() -> None:
    defaults = {"max_source_positions": 1500, "max_target_positions": 448}
    shapes = SHAPES | {
        "encoder.embed_positions.weight": (1500, CONFIG["d_model"]),
        "decoder.embed_positions.weight": (448, CONFIG["d_model"]),
    }
    check_layout(shapes, {name: size for name, size in CONFIG.items() if name not in defaults}, FOLDER)
    with pytest.raises(CheckpointError, match=r"folder/config\.json lacks 'd_model'"):
        check_layout(shapes, {name: size for name, size in CONFIG.items() if name != "d_model"}, FOLDER)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_heads_share_out_the_width(part: str) -> None:
    message = refusal(SHAPES, **{f"{part}_attention_heads": 5})
    assert f"{part}_attention_heads in folder/config.json is 5: must divide d_model, " in message


def test_pickled_weights_have_their_sizes_checked(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    check_weights(tmp_path, CONFIG)
    with pytest.raises(CheckpointError, match="must be a whole number from 1 on"):
        check_weights(tmp_path, CONFIG | {"d_model": 0})
