"""Models of openai-whisper and whisper.cpp, written by other code than ours, hear the same once converted."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from whisper.model import ModelDimensions
from whisper.model import Whisper as Reference

from asr_server.checkpoint import CheckpointError, resolve_checkpoint
from asr_server.cli import main
from asr_server.convert import convert
from asr_server.model import load_whisper
from tests.checkpoints import pocket_directory
from tests.model.test_whisper import CLIPS, TOKENS, our_logits

SIZES = ModelDimensions(80, 1500, 128, 2, 2, 51865, 448, 128, 2, 2)


@pytest.fixture(scope="module")
def reference() -> Reference:
    torch.manual_seed(3)
    model = Reference(SIZES).eval()
    torch.nn.init.normal_(model.decoder.positional_embedding)  # which is left to what was in memory
    return model


@pytest.fixture
def openai_file(reference: Reference, tmp_path: Path) -> Path:
    path = tmp_path / "my-small.pt"
    torch.save({"dims": SIZES.__dict__, "model_state_dict": reference.state_dict()}, path)
    return path


def write_ggml(reference: Reference, path: Path, kind: int = 0) -> Path:
    """As whisper.cpp's converter lays it out: sizes, filters, vocabulary, tensors with reversed shapes."""
    sizes = SIZES
    numbers: tuple[int, ...] = (
        sizes.n_vocab,
        sizes.n_audio_ctx,
        sizes.n_audio_state,
        sizes.n_audio_head,
        sizes.n_audio_layer,
    )
    numbers += (sizes.n_text_ctx, sizes.n_text_state, sizes.n_text_head, sizes.n_text_layer, sizes.n_mels)
    with path.open("wb") as file:
        file.write(struct.pack("<I11i", 0x67676D6C, *numbers, kind))
        file.write(struct.pack("<2i", 80, 201) + bytes(4 * 80 * 201))
        file.write(struct.pack("<i", 2) + struct.pack("<i", 3) + b"abc" + struct.pack("<i", 1) + b"d")
        for name, tensor in reference.state_dict().items():
            array = tensor.numpy().astype("<f4")
            if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
                array = array.reshape(-1, 1)
            file.write(struct.pack("<3i", array.ndim, len(name), kind))
            file.write(struct.pack(f"<{array.ndim}i", *array.shape[::-1]) + name.encode() + array.tobytes())
    return path


def logits_are_the_same(directory: Path, reference: Reference) -> None:
    """Our engine's model of the directory, against openai-whisper's own on the same audio and tokens."""
    ours = load_whisper(directory, "cpu", torch.float32)
    with torch.inference_mode():
        expected = reference(ours.log_mel(CLIPS), TOKENS)
    torch.testing.assert_close(our_logits(ours, one_by_one=False), expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_openai_whisper_is_the_same_model(
    openai_file: Path, reference: Reference, tmp_path: Path
) -> None:
    """By the very command that the refusal of the file names."""
    with pytest.raises(CheckpointError) as refusal:
        resolve_checkpoint(str(openai_file))
    command = str(refusal.value).split("`")[1].split()
    assert command[:2] == ["asr-server", "convert"]
    done = CliRunner().invoke(main, [*command[1:], "--tokenizer", str(pocket_directory())])
    assert done.exit_code == 0, done.output
    assert resolve_checkpoint(command[-1]) == tmp_path / "my-small"
    logits_are_the_same(tmp_path / "my-small", reference)


def test_a_ggml_model_is_the_same_model(reference: Reference, tmp_path: Path) -> None:
    source = write_ggml(reference, tmp_path / "ggml-mine.bin")
    convert(source, tmp_path / "mine", str(pocket_directory()))
    logits_are_the_same(tmp_path / "mine", reference)


def test_quantized_weights_are_refused(reference: Reference, tmp_path: Path) -> None:
    source = write_ggml(reference, tmp_path / "ggml-mine-q5_0.bin", kind=6)
    with pytest.raises(CheckpointError, match="is quantized"):
        convert(source, tmp_path / "mine", str(pocket_directory()))
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("length", [3, 60, 70_000, 10_000_000])
def test_a_file_that_is_cut_short_is_refused(reference: Reference, tmp_path: Path, length: int) -> None:
    source = write_ggml(reference, tmp_path / "ggml-mine.bin")
    source.write_bytes(source.read_bytes()[:length])
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / "mine", str(pocket_directory()))


def test_what_is_no_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("array.npy", "missing.pt"):
        done = CliRunner().invoke(main, ["convert", str(tmp_path / name), str(tmp_path / "mine")])
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "mine").exists()


def test_an_existing_directory_is_left_as_it_is(openai_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there already"):
        convert(openai_file, tmp_path, str(pocket_directory()))
