"""A checkpoint's sizes and its alignment heads."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from asr_server.checkpoint.sizes import WhisperSizes, read_alignment_heads, upper_half
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_few_checkpoints_name_the_length_of_texts_or_scale_their_embeddings(directory: Path) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name in ("max_target_positions", "scale_embedding"):
        config.pop(name, None)
    path.write_text(json.dumps(config))
    for sizes in (WhisperSizes.from_directory(directory), WhisperSizes(9, 80, 8, 1, 2, 8, 1, 2, 8)):
        assert (sizes.text_positions, sizes.scale_embedding) == (448, False)
    change(path, max_target_positions=100, scale_embedding=True)
    sizes = WhisperSizes.from_directory(directory)
    assert (sizes.text_positions, sizes.scale_embedding) == (100, True)


def test_another_activation_than_whispers_is_refused(directory: Path) -> None:
    change(directory / "config.json", activation_function="relu")
    with pytest.raises(CheckpointError, match="'relu' is not known"):
        WhisperSizes.from_directory(directory)


def test_alignment_heads_are_those_of_the_file_or_of_the_decoders_upper_half(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sizes = WhisperSizes.from_directory(directory)
    path = directory / "generation_config.json"
    change(path, alignment_heads=[[1, 3], [0, 2], [1, 0]])
    assert read_alignment_heads(directory, sizes) == {0: [2], 1: [0, 3]}
    assert not caplog.messages
    change(path, alignment_heads=[])
    assert read_alignment_heads(directory, sizes) == upper_half(sizes) == {1: [0, 1, 2, 3]}
    assert caplog.messages == [
        f"{directory} names no alignment heads: "
        "word times come from all heads of the upper half of its decoder"
    ]
    for wrong in ([2, 0], [0, 4], [-1, 0], [0, -1]):
        change(path, alignment_heads=[wrong])
        with pytest.raises(ValueError, match="which this model has not"):
            read_alignment_heads(directory, sizes)


def test_ranks_have_to_divide_heads_and_columns(directory: Path) -> None:
    sizes = WhisperSizes.from_directory(directory)
    assert sizes.why_not_shared_by(4) == ""
    assert sizes.why_not_shared_by(3) == "must divide the model's encoder_attention_heads, 4"
