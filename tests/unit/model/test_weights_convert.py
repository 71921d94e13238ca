"""A directory in Hugging Face's layout, made of models in other programs' formats."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from whisper.model import Whisper as Reference

from asr_server.annexes.model_sources.convert import convert
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.cli import main
from asr_server.errors import CheckpointError
from asr_server.model import load_whisper
from tests.support.checkpoints import pocket_directory
from tests.unit.checkpoint.foreign_models import random_reference, write_ctranslate2, write_ggml, write_openai
from tests.unit.model.test_whisper import CLIPS, TOKENS, our_logits


@pytest.fixture(scope="module")
def reference() -> Reference:
    return random_reference()


@pytest.fixture
def openai_file(reference: Reference, tmp_path: Path) -> Path:
    return write_openai(reference, tmp_path / "my-small.pt")


def logits_are_the_same(directory: Path, reference: Reference) -> None:
    """Our engine's model of the directory, against openai-whisper's own on the same audio and tokens."""
    ours = load_whisper(directory, "cpu", torch.float32)
    with torch.inference_mode():
        expected = reference(ours.log_mel(CLIPS), TOKENS)
    torch.testing.assert_close(our_logits(ours, one_by_one=False), expected, atol=1e-4, rtol=1e-4)


def test_a_model_of_openai_whisper_is_the_same_model_for_whom_the_umask_lets_read_it(
    openai_file: Path, reference: Reference, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "mine"
    arguments = ["convert", str(openai_file), str(target), "--tokenizer", str(pocket_directory())]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert resolve_checkpoint(str(target)) == target
    logits_are_the_same(target, reference)
    (tmp_path / "touched").touch()
    ordinary = stat.S_IMODE((tmp_path / "touched").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()} == {ordinary}, "as umask lets it"


def test_a_ctranslate2_model_is_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    source = write_ctranslate2(pocket_directory(), tmp_path / "ct2")
    convert(source, tmp_path / "back")
    back, before = (load_file(each / "model.safetensors") for each in (tmp_path / "back", pocket_directory()))
    assert set(back) == set(before) - {"proj_out.weight"}
    assert all(torch.equal(back[name], before[name].float()) for name in back)


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    source = write_ctranslate2(pocket_directory(), tmp_path / "ct2")
    (source / "preprocessor_config.json").unlink(missing_ok=True)  # few have one
    convert(source, tmp_path / "back")
    model: Any = WhisperForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert model.generation_config.lang_to_id["<|de|>"] == 50261
    extractor = WhisperProcessor.from_pretrained(tmp_path / "back").feature_extractor
    features = extractor(np.zeros(16_000), sampling_rate=16_000, return_attention_mask=True).input_features
    assert np.shape(features) == (1, 80, 3000)


def test_quantized_weights_are_refused(reference: Reference, tmp_path: Path) -> None:
    source = write_ggml(reference, tmp_path / "ggml-mine-q5_0.bin", kind=6)
    with pytest.raises(CheckpointError, match="is quantized"):
        convert(source, tmp_path / "mine", str(pocket_directory()))
    assert not (tmp_path / "mine").exists()


def test_what_is_no_model_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("array.npy", "missing.pt"):
        done = CliRunner().invoke(main, ["convert", str(tmp_path / name), str(tmp_path / "mine")])
        assert done.exit_code == 2
        assert len(done.output.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["array.npy"]


def test_an_existing_directory_is_left_as_it_is(openai_file: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there already"):
        convert(openai_file, tmp_path, str(pocket_directory()))
