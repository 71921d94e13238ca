"""What runs where nobody named a model."""

import pytest

from tests.support.real_weights import real_checkpoint
from tests.system.cli.test_default_model import SPEECH, command


def test_base_is_what_hears_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example recording, as `make transcribe` and `make serve` give it."""
    real_checkpoint("base")
    monkeypatch.delenv("ASR_SERVER_MODEL")
    done = command("transcribe", str(SPEECH))
    assert done.stdout == SPEECH.with_suffix(".txt").read_text()
    assert "digits" not in done.stderr
