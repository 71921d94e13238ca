"""The cross-attention heads that follow the speech, word by word: those that word times are read from."""

from __future__ import annotations

import logging
from pathlib import Path

from asr_server.checkpoint import read_optional_json
from asr_server.model.sizes import WhisperSizes

AlignmentHeads = dict[int, list[int]]  # decoder layer to its heads, both from 0 and in order

logger = logging.getLogger(__name__)


def read_alignment_heads(directory: Path, sizes: WhisperSizes) -> AlignmentHeads:
    """As generation_config.json names them, `[[layer, head], ...]`, else openai/whisper's default.

    Raises:
        ValueError: it names a head that the model does not have.
    """
    path = directory / "generation_config.json"
    pairs = read_optional_json(path).get("alignment_heads")
    if not pairs:
        logger.info(
            "%s names no alignment heads: word times come from all heads of the upper half of its decoder",
            directory,
        )
        return upper_half(sizes)
    heads: AlignmentHeads = {}
    for layer, head in sorted(pairs):
        if not (0 <= layer < sizes.decoder_layers and 0 <= head < sizes.decoder_heads):
            raise ValueError(f"{path} names the alignment head {[layer, head]}, which this model has not")
        heads.setdefault(layer, []).append(head)
    return heads


def upper_half(sizes: WhisperSizes) -> AlignmentHeads:
    """All heads of the upper half of the decoder, as openai/whisper takes them where none are named."""
    layers = range(sizes.decoder_layers // 2, sizes.decoder_layers)
    return {layer: list(range(sizes.decoder_heads)) for layer in layers}
