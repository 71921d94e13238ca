"""A checkpoint's sizes and its alignment heads."""

import json
import logging
from pathlib import Path

import pytest

from asr_server.checkpoint.sizes import WhisperSizes, read_alignment_heads, read_window, upper_half
from asr_server.core import AudioWindow
from asr_server.errors import CheckpointError
from tests.support.checkpoints import pocket_directory, short_window_directory


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


def write_checkpoint(directory: Path, config: dict[str, object], preprocessor: dict[str, object]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return directory


def test_the_window_is_as_long_as_the_encoder_has_positions_and_chunks_may_be_shorter(
    tmp_path: Path,
) -> None:
    assert read_window(pocket_directory()) == AudioWindow(1500)
    window = read_window(short_window_directory())
    assert (window.num_positions, window.duration_s, window.num_samples) == (400, 8.0, 128_000)
    (tmp_path / "config.json").write_text("{}")
    assert read_window(tmp_path) == AudioWindow(1500), "as Whisper's, if it says nothing"
    write_checkpoint(tmp_path, {"max_source_positions": 1500}, {"chunk_length": 30, "max_chunk_s": 6.5})
    window = read_window(tmp_path)
    assert (window.duration_s, window.chunk_s) == (30.0, 6.5)


def test_padding_is_silence_or_zeros(tmp_path: Path) -> None:
    assert read_window(pocket_directory()).padding == "silence"
    write_checkpoint(tmp_path, {}, {"padding": "zeros"})
    assert read_window(tmp_path).padding == "zeros"
    write_checkpoint(tmp_path, {}, {"padding": "noise"})
    with pytest.raises(CheckpointError, match=r"padding in .* is 'noise': silence or zeros"):
        read_window(tmp_path)


def test_short_audio_has_silence_of_1_5_s_behind_it_and_is_rounded_up_to_few_lengths() -> None:
    tail = AudioWindow().for_short_audio("tail")
    seconds = (0.1, 1.5, 1.501, 4.5, 4.501, 8.5, 14, 18.5, 18.501, 26.501, 27.501, 30)
    expected = [2, 3, 3.5, 6, 6.5, 10, 16, 20, 21, 29, 30, 30]
    assert [tail.positions_for(round(s * 16_000)) / 50 for s in seconds] == expected
    assert {AudioWindow().for_short_audio("exact").positions_for(n) for n in (1, 480_000)} == {1500}
    assert AudioWindow(400).for_short_audio("tail", (250, 400, 500)).short_lengths == (250,)


@pytest.mark.parametrize(
    "preprocessor", [{"chunk_length": 30}, {"hop_length": 80}, {"n_fft": 512}, {"sampling_rate": 8000}]
)
def test_features_of_another_encoder_are_an_error(tmp_path: Path, preprocessor: dict[str, object]) -> None:
    write_checkpoint(tmp_path, {"max_source_positions": 400}, preprocessor)
    ((key, value),) = preprocessor.items()
    with pytest.raises(
        CheckpointError, match=rf"{key} in .*preprocessor_config.json is {value}; its encoder needs"
    ):
        read_window(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_source_positions", 0, "0: must be a whole number from 1 on"),
        ("max_source_positions", 2.0, "2.0: must be a whole number from 1 on"),
        ("max_source_positions", True, "True: must be a whole number from 1 on"),
        ("max_source_positions", "9" * 90, f"'{'9' * 79}: must be a whole number from 1 on"),
        ("max_chunk_s", -0.1, "-0.1: must be from 0 to 3600"),
        ("max_chunk_s", 3600.1, "3600.1: must be from 0 to 3600"),
        ("max_chunk_s", False, "False: must be from 0 to 3600"),
        ("max_chunk_s", None, "None: must be from 0 to 3600"),
        ("max_chunk_s", float("nan"), "nan: must be from 0 to 3600"),
        ("max_chunk_s", float("inf"), "inf: must be from 0 to 3600"),
    ],
)
def test_other_values_are_refused_by_name(tmp_path: Path, name: str, value: object, told: str) -> None:
    write_checkpoint(tmp_path, {name: value}, {name: value})
    with pytest.raises(CheckpointError) as caught:
        read_window(tmp_path)
    assert str(caught.value).startswith(f"{name} in {tmp_path}")
    assert str(caught.value).endswith(f" is {told}")
