"""The embedded model's training: as the toy that `make train ARGS=--quick` makes, and without its voices."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.trial
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not (shutil.which("espeak-ng") and shutil.which("flite") and importlib.util.find_spec("pyworld")),
    reason="needs tools/digits/install-voices.sh and the extra [train]",
)
def test_the_quick_form_goes_from_voices_to_an_examined_model(tmp_path: Path) -> None:
    command = [sys.executable, "tools/train_digits.py", "--cache", str(tmp_path), "--quick", "all"]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=1200)
    assert "| silence | 3 of 3 |" in output.stdout
    assert len((tmp_path / "quick-curve.csv").read_text().splitlines()) == 3
    assert len((tmp_path / "quick-widened-curve.csv").read_text().splitlines()) == 2
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    extractor = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    assert config["max_source_positions"] == 50 * extractor["chunk_length"] == 400


def test_without_voices_the_examination_says_how_they_are_made(tmp_path: Path) -> None:
    command = [sys.executable, "tools/train_digits.py", "--cache", str(tmp_path / "none"), "evaluate"]
    failed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 1
    assert "train_digits.py voices" in failed.stderr
    assert "Traceback" not in failed.stderr
