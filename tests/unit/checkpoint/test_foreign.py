"""Other programs' names and files: translated, or refused with what to use instead."""

from __future__ import annotations

import pytest

from asr_server.annexes.model_sources.foreign import (
    explain_listing,
)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.bin", "vocabulary.txt"], "has no config.json"),
        (["model.safetensors"], "has no config.json"),
        (["ggml-small.bin", "ggml-base.bin"], "such as ggml-base.bin: fetch one"),
        (["tiny.pt"], "such as tiny.pt"),
        (["whisper-small.gguf"], "holds GGUF models. Use the model that it was made from: small"),
        (["weights.npz"], "is an MLX model"),
    ],
)
def test_a_listing_that_cannot_be_served_says_what_to_do(files: list[str], words: str) -> None:
    assert words in str(explain_listing("someone/whisper-small", files))
