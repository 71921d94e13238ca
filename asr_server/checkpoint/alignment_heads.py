"""Holds the alignment heads of the published models, for files that do not name theirs (.pt and ggml).

They are openai-whisper's (`whisper/__init__.py`), chosen there by how well they follow the speech.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asr_server.checkpoint.names import base_model

_HEADS: Final[Mapping[str, tuple[int, Mapping[int, tuple[int, ...]]]]] = {  # decoder layers; layer to heads
    "tiny.en": (4, {1: (0,), 2: (0, 5), 3: (0, 1, 2, 3, 4)}),
    "tiny": (4, {2: (2,), 3: (0, 2, 3, 4, 5)}),
    "base.en": (6, {3: (3,), 4: (7,), 5: (1, 5, 7)}),
    "base": (6, {3: (1,), 4: (2, 3, 7), 5: (1, 2, 4, 6)}),
    "small.en": (
        12,
        {6: (6,), 7: (0, 3, 8), 8: (2, 5, 7), 9: (0, 4, 8, 10), 10: (0, 1, 2, 3, 6, 11), 11: (2, 4)},
    ),
    "small": (12, {5: (3, 9), 8: (0, 4, 7, 8), 9: (0, 7, 9), 10: (5,)}),
    "medium.en": (
        24,
        {
            11: (4,),
            14: (1, 12, 14),
            15: (4,),
            16: (0, 4, 9),
            17: (12, 14),
            18: (7, 10, 15),
            20: (0, 3, 9, 14),
            21: (12,),
        },
    ),
    "medium": (24, {13: (15,), 15: (4, 15), 16: (1,), 20: (0,), 23: (4,)}),
    "large-v1": (32, {9: (19,), 11: (2, 4, 17), 22: (7, 11, 17), 23: (2, 15)}),
    "large-v2": (
        32,
        {
            10: (12,),
            13: (17,),
            16: (11, 12, 13),
            17: (15, 16),
            18: (4, 11, 19),
            19: (11,),
            21: (2, 3),
            22: (3, 9, 12),
            23: (5, 7, 13),
            25: (5,),
            26: (1, 12),
            27: (15,),
        },
    ),
    "large-v3": (
        32,
        {
            7: (0,),
            10: (17,),
            12: (18,),
            13: (12,),
            16: (1,),
            17: (14,),
            19: (11,),
            21: (4,),
            24: (1,),
            25: (6,),
        },
    ),
    "large-v3-turbo": (4, {2: (4, 11), 3: (3, 6, 11, 14)}),
}


def published_heads(config: Mapping[str, Any], name: str | None) -> list[tuple[int, int]]:
    """(decoder layer, head) of the published model with these sizes; none where there is no such model.

    Args:
        name: which one it may be, for large-v1 and large-v2, whose sizes are the same.
    """
    base = base_model(config)
    if base == "large-v2" and name == "large-v1":
        base = name
    num_layers, heads = _HEADS.get(base or "", (0, {}))
    if num_layers != config["decoder_layers"]:
        return []  # distilled, or of another make
    return [(layer, head) for layer, those in heads.items() for head in those]
