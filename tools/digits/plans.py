"""What is trained on what, for how long: the recipe in numbers."""

from __future__ import annotations

from pathlib import Path

from .training import FROM_NOTHING, FROM_PRETRAINED, Plan

LEFT_OUT_SPEAKER = "jackson"
"""Fixed before any result was seen: never trains the model whose error rates are published."""

STAGE_1_STEPS = 7500
STAGE_2_STEPS = 2500

_SYNTHESISED = {"espeak": 0.5, "flite": 0.17, "festival": 0.13, "pico": 0.2}
_RECORDED = 0.5


def _with_recordings() -> dict[str, float]:
    return {**{name: weight * (1 - _RECORDED) for name, weight in _SYNTHESISED.items()}, "recorded": _RECORDED}


def plan(name: str, folder: Path, steps: int | None) -> Plan:
    """The plan of this name: ``pretrain``, ``examined`` (four speakers), ``shipped`` (five)."""
    if name == "pretrain":
        return Plan(name, steps or STAGE_1_STEPS, 1.6e-3, 1, _SYNTHESISED, FROM_NOTHING)
    return Plan(
        name,
        steps or STAGE_2_STEPS,
        7e-4,
        2,
        _with_recordings(),
        FROM_PRETRAINED,
        exclude=LEFT_OUT_SPEAKER if name == "examined" else None,
        start_from=folder / "pretrain.pt",
    )
