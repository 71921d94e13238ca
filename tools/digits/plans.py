"""What is trained on what, for how long: the recipe in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .batches import Mixture
from .network import WINDOW_S
from .speakers import LEFT_OUT_SPEAKER
from .windows import Shape

_SYNTHESISED = {
    "espeak": 0.24,
    "flite": 0.07,
    "festival": 0.06,
    "pico": 0.09,
    "flite-varied": 0.04,
    "festival-varied": 0.03,
    "pico-varied": 0.04,
}
_RECORDED = {"recorded": 0.20, "recorded-varied": 0.23}
_OTHER_SPEECH = {"asterisk": 0.08}
"""Shares of the windows by group of voices; "varied" ones are WORLD's copies in other manners."""

_MORE_PEOPLE = {
    "recorded": 0.14,
    "recorded-varied": 0.25,
    "blended": 0.19,
    "hibari": 0.05,
    "hibari-varied": 0.08,
    "espeak": 0.12,
    "flite": 0.03,
    "festival": 0.03,
    "pico": 0.04,
    "flite-varied": 0.02,
    "festival-varied": 0.015,
    "pico-varied": 0.02,
    "asterisk": 0.06,
    "words": 0.02,
}
"""The same when synthesised voices have taught what they can: mostly people, and speakers between two."""

LOSS_WEIGHTS = {"text": 1.0, "time": 0.4, "ctc": 1.5, "frame": 1.0, "look": 0.3}
"""Of each loss in their sum."""
LATE_LOOK_FROM, LATE_LOOK_WEIGHT = 4.8 / 14.5, 1.0
"""From this share of the steps on, where the decoder looks counts more: by then the encoder hears, and what
lags is the decoder's finding its place."""


@dataclass(frozen=True)
class Phase:
    """Mixtures to draw from until ``until`` (a share of the steps)."""

    until: float
    mixtures: tuple[Mixture, ...]
    frames_only: bool = False
    """Only the encoder's first layers learn, from which digit is said in each frame."""


@dataclass(frozen=True)
class Plan:
    """One run of training. ``left_out_speaker`` is never heard.

    It begins from nothing, or with the averaged weights of the plan ``begins_with``.
    """

    name: str
    steps: int
    peak_rate: float
    phases: tuple[Phase, ...]
    weights: dict[str, float]
    left_out_speaker: str | None = LEFT_OUT_SPEAKER
    begins_with: str | None = None
    seed: int = 1
    judge_every: int = 500

    def loss_weight(self, loss: str, step: int) -> float:
        """The weight of this loss at this step."""
        if loss == "look" and (self.begins_with or step >= LATE_LOOK_FROM * self.steps):
            return LATE_LOOK_WEIGHT
        is_rising = loss == "ctc" and not self.begins_with
        return LOSS_WEIGHTS[loss] * (min(1.0, (step - self.frames_only_steps) / 200) if is_rising else 1.0)

    @property
    def frames_only_steps(self) -> int:
        """How many steps belong to the first phases, in which only the encoder learns.

        CTC joins after them, and slowly: from nothing it learns blanks first, and frames later for it.
        """
        return round(self.steps * max((p.until for p in self.phases if p.frames_only), default=0.0))

    def phase(self, step: int) -> Phase:
        """The phase of this step."""
        return next(phase for phase in self.phases if step / self.steps < phase.until)

    def spoiled(self, step: int) -> float:
        """How hard windows are made: from nothing it rises over a seventh of the steps."""
        return 1.0 if self.begins_with else min(1.0, 0.1 + 6.525 * step / self.steps)

    def mixture(self, step: int) -> Mixture:
        """What this step's batch is made of."""
        choices = self.phase(step).mixtures
        chosen = choices[np.random.default_rng((self.seed, step, 1)).integers(len(choices))]
        return replace(chosen, severity=min(chosen.severity, self.spoiled(step)))


def _short(sound_s: float, max_digits: int, rows: int, prompt_share: float = 0.1) -> Mixture:
    return Mixture(Shape(sound_s, max_digits, sound_s), rows, severity=0.85, prompt_share=prompt_share)


def _whole(rows: int, prompt_share: float = 0.3, empty_share: float = 0.2) -> Mixture:
    shape = Shape(WINDOW_S, 20, WINDOW_S)
    return Mixture(shape, rows, severity=0.85, empty_share=empty_share, prompt_share=prompt_share)


FROM_NOTHING = (
    Phase(2 / 14.5, (_short(1.6, 2, 18), _short(1.6, 3, 18)), frames_only=True),
    Phase(3.5 / 14.5, (_short(2.4, 4, 16), _short(2.4, 5, 16), _short(3.2, 6, 12))),
    Phase(5.5 / 14.5, (_short(3.2, 7, 16), _short(4.0, 9, 13), _short(5.0, 12, 10))),
    Phase(9 / 14.5, (_short(4.0, 10, 13, 0.25), _short(6.0, 14, 9, 0.25), _whole(7))),
    Phase(1.01, (_short(4.0, 10, 13, 0.3), _whole(7), _whole(7))),
)
"""A few digits in little noise first, for the encoder's first layers alone, then more and longer; whole
windows, as they are at inference, late."""

EXAMINED = Plan("examined", 14_500, 1e-3, FROM_NOTHING, {**_SYNTHESISED, **_RECORDED, **_OTHER_SPEECH})
"""From nothing, without the speaker left out."""
WIDENED = Plan(
    "widened",
    6000,
    4e-4,
    FROM_NOTHING[-1:],
    _MORE_PEOPLE,
    begins_with=EXAMINED.name,
)
"""On from there with more people, still without the speaker left out."""
SETTLED = Plan(
    "settled",
    900,
    2e-4,
    (Phase(1.01, (_whole(7, empty_share=0.35),)),),
    {**_MORE_PEOPLE, "espeak": 0.2, "flite": 0.05, "festival": 0.04, "pico": 0.07},
    begins_with=WIDENED.name,
)
"""On from there for a while with more windows in which nobody says a digit."""
QUICK = replace(EXAMINED, name="quick", steps=12, judge_every=6)
QUICK_WIDENED = replace(WIDENED, name="quick-widened", steps=4, judge_every=4, begins_with=QUICK.name)
"""A toy: all of it in a minute."""

FULL_RECIPE, QUICK_RECIPE = (EXAMINED, WIDENED, SETTLED), (QUICK, QUICK_WIDENED)
PLANS = {plan.name: plan for plan in (*FULL_RECIPE, *QUICK_RECIPE)}
