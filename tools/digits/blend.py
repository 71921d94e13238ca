"""Speakers between two others: one word by both, brought to the same time, with spectra in between."""

from __future__ import annotations

import numpy as np

from .noises import Random
from .vary import Analysis, Floats

_NUM_BANDS = 24


def blended(a: Analysis, b: Analysis, share: Floats) -> Analysis:
    """The word of ``a`` with as much of ``b`` in each frequency as ``share`` [bins] says.

    Time and pauses between voiced stretches are those of ``a``; pitch lies in between where both have one.
    """
    other = b.at(_partners(_shapes(a.envelope), _shapes(b.envelope)))
    voiced = (a.f0 > 0) & (other.f0 > 0)
    middle = float(share.mean())
    f0 = np.where(voiced, np.maximum(a.f0, 1) ** (1 - middle) * np.maximum(other.f0, 1) ** middle, a.f0)
    envelope = a.envelope ** (1 - share) * other.envelope**share
    return Analysis(f0, envelope, a.aperiodicity * (1 - share) + other.aperiodicity * share)


def random_share(num_bins: int, rng: Random) -> Floats:
    """A smooth curve between 0 and 1 over the frequencies: every speaker between two has one."""
    knots = np.clip(rng.uniform(0.1, 0.9) + rng.normal(0, 0.25, 5), 0, 1)
    return np.asarray(np.interp(np.linspace(0, 1, num_bins) ** 0.5, np.linspace(0, 1, 5), knots))


def _shapes(envelope: Floats) -> Floats:
    """Coarse logarithmic spectra without their level, and the level with a small weight."""
    edges = np.unique(np.geomspace(3, envelope.shape[1], _NUM_BANDS + 1).astype(np.int64))
    bands = np.log(np.add.reduceat(envelope, edges[:-1], axis=1))
    level = bands.mean(axis=1, keepdims=True)
    return np.concatenate([bands - level, level - level.max()], axis=1)


def _partners(a: Floats, b: Floats) -> Floats:
    """For each frame of ``a`` the frame of ``b`` that goes with it (dynamic time warping)."""
    distances = np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))
    total = np.full((len(a) + 1, len(b) + 1), np.inf)
    total[0, 0] = 0
    for i, row in enumerate(distances.tolist(), 1):
        above, here = total[i - 1].tolist(), [np.inf]
        for j, cost in enumerate(row, 1):
            here.append(cost + min(above[j - 1], above[j], here[j - 1]))
        total[i] = here
    return _mean_partner(total)


def _mean_partner(total: Floats) -> Floats:
    i, j = total.shape[0] - 1, total.shape[1] - 1
    sums, counts = np.zeros(i), np.zeros(i)
    while i > 0 and j > 0:
        sums[i - 1] += j - 1
        counts[i - 1] += 1
        step = int(np.argmin([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]]))
        i, j = i - (step != 2), j - (step != 1)
    return np.asarray(sums / np.maximum(counts, 1))
