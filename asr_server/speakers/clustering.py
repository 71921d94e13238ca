"""Decides which local speakers of the windows are one person, and how many people there are.

Agglomerative clustering with average linkage on the cosine of embeddings (the mean of all pairs is the
product of the means), where two local speakers of one window are never one. Voices heard for long make the
clusters; the others join the nearest. From which cosine two are one person depends on the recording, as a
telephone makes all voices more alike and noise makes each less like itself: it moves with the middle between
what stretches of one person have and what people of one window have. Pure computation: used by `track.py`,
and by `voices.py` for the stretches of one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

SAME: Final = 0.52  # mean cosine from which two groups are one person
ALIKE: Final = 0.6  # cosine from which even two of one window are one person, heard as two
SURE_S: Final = 1.5  # of clean speech, from which a voice may make a cluster
# Of clean speech, of which windows that overlap hear all but the ends twice.
SMALLEST_S: Final = 5.0  # a smaller cluster is no person of its own
SMALLEST_SHARE: Final = 0.05  # of all speech; one of LARGE_S is a person in any case
LARGE_S: Final = 36.0
CENTRES: Final = 0.62  # cosine of the means of two clusters from which they are one person
# The same, where one of both is heard by telephone. Of 14 people one's own is 0.56 or more, another's 0.39 at
# most, by a line of 8 kHz and mu-law.
CENTRES_ACROSS: Final = 0.48
BLOCK: Final = 600  # voices clustered at once, half an hour or so: the cost grows with the third power
STRICTER: Final = 0.08  # by which both cosines rise as long as fewer people are found than there are
# What a recording's own cosines change, of which these are usual ones, as if they had been found so often.
ONE_PERSON, TWO_PEOPLE, USUAL = 0.65, 0.15, 8
MOVES: Final = 1.4  # SAME and CENTRES for each change of the middle between both
# At most so much: where the segmentation takes one person for two, "two people" are as alike as one is.
MOST_MOVED: Final = 0.1
FEWEST_S: Final = 1.0  # of clean speech of a voice whose cosine counts
KNOWN: Final = 0.45  # cosine with a reference from which a cluster is that person


@dataclass(frozen=True)
class SpeakerCount:
    """What is known about the number of speakers."""

    least: int = 1
    most: int | None = None


def cluster(
    embeddings: Floats,
    clean_s: npt.NDArray[np.float64],
    windows: Ints,
    count: SpeakerCount,
    alike: Sequence[float] = (),
    narrow: Flags | None = None,
) -> Ints:
    """[num_voices]: the number of each one's cluster.

    Args:
        embeddings: [num_voices, 192], of length 1.
        clean_s: [num_voices], how much each has heard.
        windows: [num_voices]; two of one window are different people.
        alike: cosines of stretches that one person says.
        narrow: [num_voices], whether each is heard as by telephone.
    """
    is_narrow = np.zeros(len(embeddings), np.bool_) if narrow is None else narrow
    moved = _moved(embeddings, clean_s, windows, alike)
    sure = np.flatnonzero(clean_s >= min(SURE_S, float(np.median(clean_s))))
    weights = np.minimum(clean_s, 3.5)
    smallest_s = min(max(SMALLEST_S, SMALLEST_SHARE * float(clean_s.sum())), LARGE_S)
    groups: list[Ints] = []
    large: list[Ints] = []
    for stricter in np.arange(0.0, 1.0 - SAME, STRICTER):
        found = _group(sure, embeddings, weights, windows, is_narrow, moved, float(stricter))
        if len(groups) < count.least:
            groups = found
        large = [group for group in found if clean_s[group].sum() >= smallest_s]
        if len(large) >= count.least or len(found) > BLOCK:
            break
    if len(large) < max(1, count.least):  # people who say little, or fewer than were asked for
        large = sorted(groups, key=lambda group: -clean_s[group].sum())[: max(1, count.least)]
    if count.most is not None:
        large = _join_alike(large, embeddings, weights, is_narrow, most=count.most)
    means = directions(large, embeddings, weights)
    labels = np.full(len(embeddings), -1, np.int64)
    for number, group in enumerate(large):
        labels[group] = number
    for voice in sorted(np.flatnonzero(labels < 0), key=lambda voice: -clean_s[voice]):
        scores = means @ embeddings[voice]
        taken = labels[(windows == windows[voice]) & (labels >= 0)]
        if len(set(taken.tolist())) < len(large):
            scores[taken] = -np.inf
        labels[voice] = int(scores.argmax())
    return labels


def name_known(
    labels: Ints, embeddings: Floats, clean_s: npt.NDArray[np.float64], references: Floats
) -> dict[int, int]:
    """Cluster to reference, for clusters that sound like one; each at most once, the likeliest first."""
    numbers = sorted(set(labels.tolist()))
    groups = [np.flatnonzero(labels == number) for number in numbers]
    scores = directions(groups, embeddings, clean_s) @ references.T
    known: dict[int, int] = {}
    while scores.size and scores.max() >= KNOWN:
        place, reference = np.unravel_index(int(scores.argmax()), scores.shape)
        known[numbers[place]] = int(reference)
        scores[place], scores[:, reference] = -1, -1
    return known


def _moved(
    embeddings: Floats, clean_s: npt.NDArray[np.float64], windows: Ints, alike: Sequence[float]
) -> float:
    """What SAME and CENTRES have to be moved by in this recording."""
    order = np.argsort(windows, kind="stable")
    order = order[clean_s[order] >= FEWEST_S]
    apart: list[float] = []  # cosines of two people
    for ahead in (1, 2):
        first, second = order[:-ahead], order[ahead:]
        pairs = np.stack([first, second])[:, windows[first] == windows[second]]
        apart += np.einsum("ij,ij->i", *embeddings[pairs]).tolist()
    one = (sum(alike) + USUAL * ONE_PERSON) / (len(alike) + USUAL)
    two = (sum(apart) + USUAL * TWO_PEOPLE) / (len(apart) + USUAL)
    return min(MOST_MOVED, MOVES * ((one + two) - (ONE_PERSON + TWO_PEOPLE)) / 2)


def _group(
    sure: Ints,
    embeddings: Floats,
    weights: npt.NDArray[np.float64],
    windows: Ints,
    narrow: Flags,
    moved: float,
    stricter: float,
) -> list[Ints]:
    """The voices `sure` in groups of one person each; both cosines are `moved`, and `stricter` is added.
    Where that leaves more than a block of groups, nobody is told apart by it, and they stay as they are.
    """
    groups, same = [np.array([index]) for index in sure], SAME + moved + stricter
    while len(groups) > BLOCK:
        before = len(groups)
        blocks = [groups[first : first + BLOCK] for first in range(0, len(groups), BLOCK)]
        groups = [each for block in blocks for each in merge(block, embeddings, weights, windows, same)]
        if stricter and len(groups) > BLOCK:
            return groups
        if len(groups) == before:
            break
    groups = merge(groups, embeddings, weights, windows, same)
    centres = CENTRES + moved + stricter, CENTRES_ACROSS + stricter
    return _join_alike(groups, embeddings, weights, narrow, *centres)


def _join_alike(
    groups: list[Ints],
    embeddings: Floats,
    weights: npt.NDArray[np.float64],
    narrow: Flags,
    centres: float = 1.0,
    centres_across: float = 1.0,
    most: int | None = None,
) -> list[Ints]:
    """Joins clusters whose means point the same way: what differs between the voices of one person, a
    whisper and a shout, is averaged out in them.

    Args:
        centres: cosine from which they do.
        centres_across: the same, where one of both is heard by telephone.
        most: clusters that may be left; more are joined whatever their cosine.
    """
    groups = list(groups)
    while len(groups) > 1:
        means = directions(groups, embeddings, weights)
        shares = np.array([np.average(narrow[group], weights=weights[group]) for group in groups])
        is_across = np.abs(shares[:, None] - shares) > 0.5
        above = means @ means.T - np.where(is_across, centres_across, centres)
        np.fill_diagonal(above, -np.inf)
        first, second = sorted(divmod(int(above.argmax()), len(groups)))
        if above[first, second] < 0 and (most is None or len(groups) <= most):
            break
        groups[first] = np.concatenate([groups[first], groups.pop(second)])
    return groups


def directions(groups: list[Ints], embeddings: Floats, weights: npt.NDArray[np.float64]) -> Floats:
    """[num_groups, 192]: the means of the groups, of length 1."""
    means = np.stack([mean(group, embeddings, weights) for group in groups])
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)
    return means


def mean(group: Ints, embeddings: Floats, weights: npt.NDArray[np.float64]) -> Floats:
    mean = weights[group] @ embeddings[group] / max(float(weights[group].sum()), 1e-9)
    return np.asarray(mean, np.float32)


def merge(
    groups: list[Ints],
    embeddings: Floats,
    weights: npt.NDArray[np.float64],
    windows: Ints,
    same: float,
    fewest: int = 1,
) -> list[Ints]:
    """Joins the two groups that are most alike until none have a mean cosine of `same`, or `fewest` are
    left.
    """
    if not groups:
        return groups
    means = np.stack([mean(group, embeddings, weights) for group in groups])
    totals = np.array([weights[group].sum() for group in groups])
    held = [set(windows[group].tolist()) for group in groups]
    alike = means @ means.T
    for first, of_first in enumerate(held):
        for second in range(first):
            if not of_first.isdisjoint(held[second]) and alike[first, second] < ALIKE:
                alike[first, second] = alike[second, first] = -2.0
    np.fill_diagonal(alike, -3.0)
    merged: dict[int, Ints] = dict(enumerate(groups))
    while len(merged) > fewest:
        first, second = divmod(int(alike.argmax()), len(groups))
        if alike[first, second] < same:
            break
        merged[first] = np.concatenate([merged[first], merged.pop(second)])
        held[first] |= held[second]
        total = totals[first] + totals[second]
        means[first] = (totals[first] * means[first] + totals[second] * means[second]) / total
        totals[first] = total
        alive = [each for each in merged if each != first]
        alike[second] = alike[:, second] = -3.0
        row = np.full(len(groups), -3.0, np.float32)
        row[alive] = np.einsum("ij,j->i", means[alive], means[first])  # without BLAS's threads (`voices.py`)
        row[[each for each in alive if not held[each].isdisjoint(held[first])]] = -2.0
        alike[first] = alike[:, first] = row
    return list(merged.values())
