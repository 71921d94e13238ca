"""Checkpoints that contradict themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asr_server.checkpoint.files import AudioWindow
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.engine.prompt import check_timestamps
from asr_server.model import WhisperSizes
from tests.support.checkpoints import short_window_directory


def test_timestamps_that_end_before_the_window_are_refused() -> None:
    sizes = WhisperSizes.from_directory(short_window_directory())
    specials = Tokenizer.from_directory(short_window_directory()).specials
    check_timestamps(specials, sizes)
    with pytest.raises(ValueError, match="timestamps end at 8 s, the window at 30 s"):
        check_timestamps(specials, replace(sizes, window=AudioWindow(1500)))
