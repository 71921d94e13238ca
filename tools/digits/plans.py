"""What is trained on what, for how long: the recipe in numbers."""

from __future__ import annotations

from pathlib import Path

from .training import FROM_NOTHING, FROM_PRETRAINED, Plan

LEFT_OUT_SPEAKER = "jackson"
"""Fixed before any result was seen: never trains the model whose error rates are published."""

STAGE_1_STEPS = 5000
STAGE_1_STOP = 3417
STAGE_2_STEPS = 4700

_SYNTHESISED = {
    "espeak": 0.42,
    "flite": 0.12,
    "festival": 0.10,
    "pico": 0.14,
    "flite-varied": 0.08,
    "festival-varied": 0.06,
    "pico-varied": 0.08,
}
_RECORDED = {"recorded": 0.22, "recorded-varied": 0.28}
"""Shares of the windows by group of voices; "varied" ones are WORLD's copies in other manners."""


def _with_recordings() -> dict[str, float]:
    rest = 1 - sum(_RECORDED.values())
    return {**{name: weight * rest for name, weight in _SYNTHESISED.items()}, **_RECORDED}


def plan(name: str, folder: Path) -> Plan:
    """The plan of this name: ``pretrain``, ``examined`` (four speakers), ``shipped`` (five)."""
    if name == "pretrain":
        return Plan(name, STAGE_1_STEPS, 1.6e-3, 1, _SYNTHESISED, FROM_NOTHING, stop_at=STAGE_1_STOP)
    return Plan(
        name,
        STAGE_2_STEPS,
        1.0e-3,
        2,
        _with_recordings(),
        FROM_PRETRAINED,
        exclude=LEFT_OUT_SPEAKER if name == "examined" else None,
        start_from=folder / "pretrain.pt",
    )
