"""Decide which local speakers of the windows are one person, and how many people there are.

Agglomerative clustering, average linkage on cosines; local speakers of one window are never joined. Long
voices make the clusters, others join the nearest. The threshold follows the recording, because telephones
and noise shift all cosines: it moves with the middle between those within a person and those within a
window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.core import SpeakerCount

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
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
# By which both cosines rise as long as fewer people are found than there are.
_STRICTER: Final = tuple(np.arange(0.08, 1.0 - SAME, 0.08).tolist())
MOST_GROUPS: Final = 100  # that are joined until as many are left as were asked for
# What a recording's own cosines change, of which these are usual ones, as if they had been found so often.
ONE_PERSON, TWO_PEOPLE, USUAL = 0.65, 0.15, 8
MOVES: Final = 1.4  # SAME and CENTRES for each change of the middle between both
# At most so much: where the segmentation takes one person for two, "two people" are as alike as one is.
MOST_MOVED: Final = 0.1
FEWEST_S: Final = 1.0  # of clean speech of a voice whose cosine counts
# Cosine with everybody else, below which a smaller cluster is a person too: the more it says of all, the
# more alike it may be. An actor has voices that say a twentieth and are at 0.2 to his others.
DISTINCT, DISTINCT_BY_SHARE, MOST_DISTINCT = 0.1, 0.8, 0.35
DISTINCT_S, DISTINCT_SHARE = 2.0, 0.01  # of clean speech, and of all speech
SHORT_S: Final = 0.8  # of clean speech, from which a voice may be one of the people who are asked for
LIKE_REFERENCE: Final = 0.35  # cosine with a reference from which a voice that is nobody yet is that person
KNOWN_OF_FEW: Final = 0.2  # the same for clusters, where there are no more people than references
KNOWN: Final = 0.45  # cosine with a reference from which a cluster is that person


class Clusters(NamedTuple):
    labels: Ints  # [num_voices]: the number of its cluster
    known: dict[int, int]  # the reference of each cluster that sounds like one


@dataclass(frozen=True)
class _Voices:
    embeddings: Floats  # [num_voices, 192] of length 1
    clean_s: Doubles  # [num_voices]
    windows: Ints  # [num_voices]
    narrow: Flags  # [num_voices]
    weights: Doubles  # [num_voices]
    moved: float  # of SAME and CENTRES in this recording

    def means(self, groups: list[Ints]) -> Floats:
        return directions(groups, self.embeddings, self.weights)

    def spoken_s(self, group: Ints) -> float:
        return float(self.clean_s[group].sum())

    def groups(self, least_s: float, stricter: float = 0.0) -> list[Ints]:
        """Group the voices of so many seconds by person, largest first; `stricter` raises both cosines.

        If more than a block of groups is left, the voices do not differ: keep them as they are.
        """
        sure = np.flatnonzero(self.clean_s >= min(least_s, float(np.median(self.clean_s))))
        groups, same = [np.array([voice]) for voice in sure], SAME + self.moved + stricter
        num_before = len(groups) + 1
        while BLOCK < len(groups) < num_before:
            num_before = len(groups)
            blocks = [groups[first : first + BLOCK] for first in range(0, len(groups), BLOCK)]
            groups = [group for block in blocks for group in self._merged(block, same)]
        if len(groups) <= BLOCK or not stricter:
            groups = self._without_alike(self._merged(groups, same), stricter)
        return sorted(groups, key=lambda group: -self.spoken_s(group))

    def _merged(self, groups: list[Ints], same: float) -> list[Ints]:
        return merge(groups, self.embeddings, self.weights, self.windows, same)

    def _without_alike(self, groups: list[Ints], stricter: float) -> list[Ints]:
        """Join clusters with similar means, which average out whispers and shouts."""
        while len(groups) > 1:
            means = self.means(groups)
            shares = np.array([np.average(self.narrow[each], weights=self.weights[each]) for each in groups])
            is_across = np.abs(shares[:, None] - shares) > 0.5
            centres = np.where(is_across, CENTRES_ACROSS, CENTRES + self.moved) + stricter
            above = means @ means.T - centres
            np.fill_diagonal(above, -np.inf)
            if above.max() < 0:
                break
            groups = _joined(groups, int(above.argmax()))
        return groups


def cluster(
    embeddings: Floats,  # [num_voices, 192], of length 1
    clean_s: Doubles,  # [num_voices], seconds of each alone
    windows: Ints,  # [num_voices]; voices of one window differ
    count: SpeakerCount,
    alike: Sequence[float] = (),  # cosines within stretches of one person
    narrow: Flags | None = None,  # [num_voices], telephone band
    references: Sequence[Floats] = (),  # embeddings of known people
) -> Clusters:
    """Find the people."""
    is_narrow = np.zeros(len(embeddings), np.bool_) if narrow is None else narrow
    moved = _moved(embeddings, clean_s, windows, alike)
    voices = _Voices(embeddings, clean_s, windows, is_narrow, np.minimum(clean_s, 3.5), moved)
    people = _people(voices.groups(SURE_S), voices)
    is_closed = count.most is not None and count.most <= len(references)
    least = KNOWN_OF_FEW if is_closed else KNOWN
    named = name_known(voices.means(people), references, least).values()
    for number, reference in enumerate(references):
        if number not in named:
            people += _like(reference, people, voices)
    if len(people) < count.least:
        people = _more_people(count.least, voices)
    if count.most is not None:
        people = _at_most(people, count.most, voices)
    means = voices.means(people)
    return Clusters(_assign(people, means, voices), name_known(means, references, least))


def _people(groups: list[Ints], voices: _Voices) -> list[Ints]:
    total_s = float(voices.clean_s.sum())
    smallest_s = min(max(SMALLEST_S, SMALLEST_SHARE * total_s), LARGE_S)
    smallest_distinct_s = min(max(DISTINCT_S, DISTINCT_SHARE * total_s), LARGE_S)
    means = voices.means(groups)
    people = [0]
    for number, group in enumerate(groups[1:], 1):
        spoken_s = voices.spoken_s(group)
        below = min(DISTINCT + DISTINCT_BY_SHARE * spoken_s / total_s, MOST_DISTINCT) + voices.moved
        is_distinct = float((means[people] @ means[number]).max()) < below
        if spoken_s >= (smallest_distinct_s if is_distinct else smallest_s):
            people.append(number)
    return [groups[number] for number in people]


def _more_people(least: int, voices: _Voices) -> list[Ints]:
    """Cut the tree at a stricter cosine, then join what loses least."""
    for stricter in _STRICTER:
        groups = voices.groups(SHORT_S, stricter)
        if len(groups) >= least:
            break
    return _at_most(groups[:MOST_GROUPS], least, voices)


def _at_most(people: list[Ints], most: int, voices: _Voices) -> list[Ints]:
    """Join the closest pairs (Ward, 1963) until `most` are left."""
    while len(people) > most:
        people = _joined(people, int(_losses(people, voices).argmin()))
    return people


def _joined(groups: list[Ints], place: int) -> list[Ints]:
    """Join two groups, by their place in a matrix of all pairs."""
    first, second = sorted(divmod(place, len(groups)))
    both = np.concatenate([groups[first], groups[second]])
    return [*groups[:first], both, *groups[first + 1 : second], *groups[second + 1 :]]


def _losses(people: list[Ints], voices: _Voices) -> Doubles:
    """Return what joining each pair loses, [num_people, num_people]."""
    means = voices.means(people)
    spoken_s = np.array([voices.spoken_s(group) for group in people])
    lost = (1 - means @ means.T) * spoken_s * spoken_s[:, None] / (spoken_s + spoken_s[:, None])
    np.fill_diagonal(lost, np.inf)
    return np.asarray(lost, np.float64)


def _assign(people: list[Ints], means: Floats, voices: _Voices) -> Ints:
    labels = np.full(len(voices.embeddings), -1, np.int64)
    for number, group in enumerate(people):
        labels[group] = number
    for voice in sorted(np.flatnonzero(labels < 0), key=lambda voice: -voices.clean_s[voice]):
        scores = means @ voices.embeddings[voice]
        taken = labels[(voices.windows == voices.windows[voice]) & (labels >= 0)]
        if len(set(taken.tolist())) < len(people):
            scores[taken] = -np.inf
        labels[voice] = int(scores.argmax())
    return labels


def _like(reference: Floats, people: list[Ints], voices: _Voices) -> list[Ints]:
    scores = voices.embeddings @ reference
    nearest = (voices.embeddings @ voices.means(people).T).max(axis=1)
    is_like = (scores >= LIKE_REFERENCE) & (scores > nearest)
    is_like[np.concatenate(people)] = False
    return [np.flatnonzero(is_like)] if is_like.any() else []


def name_known(means: Floats, references: Sequence[Floats], least: float = KNOWN) -> dict[int, int]:
    known: dict[int, int] = {}
    if not len(references):
        return known
    scores = means @ np.stack(references).T
    while scores.max() >= least:
        number, reference = np.unravel_index(int(scores.argmax()), scores.shape)
        known[int(number)] = int(reference)
        scores[number], scores[:, reference] = -1, -1
    return known


def _moved(embeddings: Floats, clean_s: Doubles, windows: Ints, alike: Sequence[float]) -> float:
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


def directions(groups: list[Ints], embeddings: Floats, weights: Doubles) -> Floats:
    """Return the groups' means of length 1, [num_groups, 192]."""
    means = np.stack([mean(group, embeddings, weights) for group in groups])
    means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-9)
    return means


def mean(group: Ints, embeddings: Floats, weights: Doubles) -> Floats:
    mean = weights[group] @ embeddings[group] / max(float(weights[group].sum()), 1e-9)
    return np.asarray(mean, np.float32)


def merge(
    groups: list[Ints], embeddings: Floats, weights: Doubles, windows: Ints, same: float, fewest: int = 1
) -> list[Ints]:
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
