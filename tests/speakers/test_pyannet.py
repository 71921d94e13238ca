"""The three converted graphs of the segmentation: the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asr_server.speakers.models import CONVOLUTIONS, FILTERS, LSTM, speaker_models
from asr_server.speakers.pyannet import convert_convolutions, convert_filters, convert_lstm
from tests.speakers.people import require_models


@pytest.mark.parametrize(
    ("name", "convert"),
    [(FILTERS, convert_filters), (CONVOLUTIONS, convert_convolutions), (LSTM, convert_lstm)],
)
def test_a_conversion_gives_the_same_bytes_each_time(name: str, convert: Callable[[Path], bytes]) -> None:
    require_models()
    folder = speaker_models()
    assert folder
    assert convert(folder / "pytorch_model.bin") == (folder / name).read_bytes()
