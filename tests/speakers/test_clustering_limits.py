"""From which cosine, and from how many seconds on, somebody is a person: on voices of exact cosines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asr_server.speakers.clustering import Clusters, Floats, SpeakerCount, cluster, name_known

SIZE = 192


def voices(sizes: list[int], between: float | list[list[float]], within: float | list[float] = 1.0) -> Floats:
    """Groups of so many voices, with these cosines between groups and within each."""
    cosines = np.full((len(sizes), len(sizes)), between) if isinstance(between, float) else np.array(between)
    people = np.repeat(np.arange(len(sizes)), sizes)
    of_people = np.broadcast_to(np.asarray(within, np.float64), len(sizes))
    gram = np.where(people[:, None] == people, of_people[people], cosines[people[:, None], people])
    np.fill_diagonal(gram, 1.0)
    values, vectors = np.linalg.eigh(gram)
    assert values.min() > -1e-6
    made = np.zeros((len(people), SIZE), np.float32)
    made[:, : len(people)] = vectors * np.sqrt(np.maximum(values, 0))
    return made


def people_of(embeddings: Floats, clean_s: Any = 3.0, windows: Any = None, **more: Any) -> list[int]:
    return [int(label) for label in clusters_of(embeddings, clean_s, windows, **more).labels]


def clusters_of(embeddings: Floats, clean_s: Any = 3.0, windows: Any = None, **more: Any) -> Clusters:
    seconds = np.broadcast_to(np.asarray(clean_s, np.float64), len(embeddings)).copy()
    places = np.arange(len(embeddings)) if windows is None else np.array(windows)
    return cluster(embeddings, seconds, places, more.pop("count", SpeakerCount()), **more)


def num_people(*arguments: Any, **more: Any) -> int:
    return len(set(people_of(*arguments, **more)))


@pytest.mark.parametrize(
    ("alike", "same"), [([], 0.52), ([0.75] * 8, 0.555), ([0.45] * 8, 0.45), ([0.95] * 50, 0.62)]
)
def test_groups_are_one_person_from_a_cosine_that_follows_the_recording(
    alike: list[float], same: float
) -> None:
    assert num_people(voices([6, 6], same + 0.005), alike=alike) == 1
    assert num_people(voices([6, 6], same - 0.005), alike=alike) == 2


@pytest.mark.parametrize(("short_s", "same"), [(1.0, 0.59), (0.99, 0.52)])
def test_people_of_one_window_who_are_alike_raise_the_cosine(short_s: float, same: float) -> None:
    """Of eight windows with two people at 0.35, where usual is 0.15; voices under a second do not count."""
    clean_s = [short_s] * 16 + [3.0] * 12
    windows = [*np.repeat(np.arange(8), 2), *range(100, 112)]
    for cosine, num in ((same + 0.01, 3), (same - 0.01, 4)):
        between = [[1, 0.35, 0, 0], [0.35, 1, 0, 0], [0, 0, 1, cosine], [0, 0, cosine, 1]]
        order = [*np.arange(16).reshape(2, 8).T.ravel(), *range(16, 28)]
        embeddings = voices([8, 8, 6, 6], between)[order]
        assert num_people(embeddings, clean_s, windows) == num


def test_three_of_one_window_are_three_pairs() -> None:
    windows = [*np.repeat(np.arange(4), 3), *range(100, 112)]
    order = [*np.arange(12).reshape(3, 4).T.ravel(), *range(12, 24)]
    for cosine, num in ((0.60, 4), (0.58, 5)):  # twelve pairs at 0.3166 are as eight at 0.35
        apart = np.full((3, 3), (20 * 0.25 - 8 * 0.15) / 12)
        between = np.eye(5)
        between[:3, :3] = apart
        between[3, 4] = between[4, 3] = cosine
        assert num_people(voices([4, 4, 4, 6, 6], between.tolist())[order], 3.0, windows) == num


@pytest.mark.parametrize(("cosine", "num"), [(0.41, 1), (0.385, 2)])
def test_clusters_are_one_person_whose_means_are_alike(cosine: float, num: int) -> None:
    """Ten voices at 0.6 have a mean of length 0.8: 0.4 between voices is 0.625 between means."""
    assert num_people(voices([10, 10], cosine, within=0.6)) == num


@pytest.mark.parametrize(
    ("num_narrow", "cosine", "num"), [(6, 0.32, 1), (5, 0.32, 2), (6, 0.29, 2), (10, 0.32, 1), (20, 0.32, 2)]
)
def test_between_a_telephone_and_a_room_less_is_enough(num_narrow: int, cosine: float, num: int) -> None:
    narrow = np.arange(20) < num_narrow
    assert num_people(voices([10, 10], cosine, within=0.6), narrow=narrow) == num


@pytest.mark.parametrize(("cosine", "num"), [(0.61, 1), (0.59, 2)])
def test_two_of_one_window_are_one_only_where_they_are_alike(cosine: float, num: int) -> None:
    assert num_people(voices([1, 1], cosine), 6.0, [0, 0]) == num


@pytest.mark.parametrize(
    ("main_s", "other_s", "cosine", "num"),
    [
        (50.0, 5.0, 0.45, 2),
        (50.0, 4.9, 0.45, 1),
        (200.0, 11.0, 0.45, 2),
        (200.0, 10.0, 0.45, 1),
        (1000.0, 36.0, 0.45, 2),
        (1000.0, 35.0, 0.45, 1),
        (50.0, 3.0, 0.14, 2),
        (50.0, 3.0, 0.15, 1),
        (50.0, 2.0, 0.12, 2),
        (50.0, 1.9, 0.12, 1),
        (400.0, 4.2, 0.10, 2),
        (400.0, 3.8, 0.10, 1),
        (6.0, 4.0, 0.345, 2),
        (6.0, 4.0, 0.355, 1),
    ],
)
def test_how_much_a_person_says_depends_on_all_speech_and_on_being_unlike(
    main_s: float, other_s: float, cosine: float, num: int
) -> None:
    assert num_people(voices([20, 1], cosine), [main_s / 20] * 20 + [other_s]) == num


@pytest.mark.parametrize(("short_s", "num"), [(1.5, 2), (1.4, 1)])
def test_a_cluster_is_made_of_voices_of_a_second_and_a_half(short_s: float, num: int) -> None:
    assert num_people(voices([20, 6], 0.3), [3.0] * 20 + [short_s] * 6) == num


def test_where_most_voices_are_short_half_of_them_make_the_clusters() -> None:
    assert num_people(voices([12, 10], 0.3), [1.0] * 12 + [0.9] * 10) == 1
    assert num_people(voices([10, 9], 0.3), [0.9] * 10 + [1.0] * 9) == 2


@pytest.mark.parametrize(
    ("short_s", "cosine", "is_own"), [(0.8, 0.34, True), (0.79, 0.34, False), (0.8, 0.36, False)]
)
def test_who_is_asked_for_may_say_little_and_must_be_unlike(
    short_s: float, cosine: float, is_own: bool
) -> None:
    labels = people_of(voices([20, 1], cosine), [2.5] * 20 + [short_s], count=SpeakerCount(2, 2))
    assert (labels.count(labels[-1]) == 1) == is_own


@pytest.mark.parametrize(("cosine", "is_known"), [(0.46, True), (0.44, False)])
def test_a_cluster_is_known_from_a_cosine_with_its_reference(cosine: float, is_known: bool) -> None:
    made = voices([1, 1, 1], [[1, 0.1, cosine], [0.1, 1, 0.2], [cosine, 0.2, 1]])
    assert name_known(made[:2], [made[2]]) == ({0: 0} if is_known else {})
    assert name_known(made[:2], [made[2]], 0.43) == {0: 0}
    assert name_known(made[:2], []) == {}


def test_each_reference_is_one_cluster_s_and_the_likest_go_first() -> None:
    made = voices(
        [1, 1, 1, 1], [[1, 0.3, 0.6, 0.7], [0.3, 1, 0.5, 0.65], [0.6, 0.5, 1, 0.4], [0.7, 0.65, 0.4, 1]]
    )
    assert name_known(made[:2], [made[2], made[3]]) == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("most", "cosine", "is_known"), [(1, 0.21, True), (1, 0.19, False), (2, 0.21, False)]
)
def test_where_no_more_people_than_references_are_asked_for_less_is_enough(
    most: int, cosine: float, is_known: bool
) -> None:
    made = voices([10, 1], cosine)
    found = clusters_of(made[:-1], count=SpeakerCount(1, most), references=[made[-1]])
    assert (found.known == {0: 0}) == is_known


@pytest.mark.parametrize(("cosine", "num"), [(0.36, 2), (0.34, 1)])
def test_a_reference_finds_its_person_in_voices_that_made_no_cluster(cosine: float, num: int) -> None:
    between = [[1, 0.3, 0.0], [0.3, 1, cosine], [0.0, cosine, 1]]
    made = voices([20, 2, 1], between)
    found = clusters_of(made[:-1], [3.0] * 20 + [0.5] * 2, references=[made[-1]])
    assert len(set(found.labels.tolist())) == num
    nearer = voices([20, 2, 1], [[1, 0.4, 0.0], [0.4, 1, 0.38], [0.0, 0.38, 1]])
    assert len(set(clusters_of(nearer[:-1], [3.0] * 20 + [0.5] * 2, references=[nearer[-1]]).labels)) == 1


def test_a_short_voice_is_the_nearest_person_who_does_not_speak_beside_it() -> None:
    between = [[1, 0.2, 0.6], [0.2, 1, 0.5], [0.6, 0.5, 1]]
    made, clean_s = voices([6, 6, 1], between), [3.0] * 12 + [0.5]
    alone = people_of(made, clean_s)
    assert alone[12] == alone[0]
    beside_the_first = people_of(made, clean_s, [*range(12), 0])
    assert beside_the_first[12] == beside_the_first[6]
    beside_both = people_of(made, clean_s, [0, *range(1, 6), 0, *range(7, 12), 0])
    assert beside_both[12] == beside_both[0]


def test_people_are_numbered_by_how_much_they_say() -> None:
    assert people_of(voices([3, 6], 0.2))[0] == 1


def test_as_many_as_are_asked_for_are_joined_by_what_is_lost() -> None:
    """The two who are alike say much, and the third little: it is the third who is given up."""
    made = voices([20, 20, 3], [[1, 0.45, 0.1], [0.45, 1, 0.15], [0.1, 0.15, 1]])
    labels = people_of(made, 2.0, count=SpeakerCount(1, 2))
    assert (labels[0] == labels[20], labels[40] == labels[20]) == (False, True)
    much = people_of(
        voices([20, 20, 20], [[1, 0.45, 0.1], [0.45, 1, 0.15], [0.1, 0.15, 1]]), 2.0, count=SpeakerCount(1, 2)
    )
    assert (much[0] == much[20], much[40] == much[20]) == (True, False)


def test_one_more_who_is_asked_for_leaves_all_others_as_they_are() -> None:
    """The first two sound like one; both others have voices that change more."""
    between = np.full((4, 4), 0.3)
    between[0, 1] = between[1, 0] = 0.55
    made = voices([8, 8, 20, 20], between.tolist(), [0.75, 0.75, 0.62, 0.62])
    assert num_people(made) == 3
    labels = people_of(made, count=SpeakerCount(4, 4))
    of_people = [set(labels[first:end]) for first, end in ((0, 8), (8, 16), (16, 36), (36, 56))]
    assert sorted(of_people, key=min) == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize(("other_s", "is_own"), [(4.0, True), (1.6, False)])
def test_one_more_is_a_small_group_or_a_half_of_somebody_by_what_joining_loses(
    other_s: float, is_own: bool
) -> None:
    """Twelve seconds are two people's at 0.55; another sound is like them at 0.4."""
    made = voices([4, 4, 1], [[1, 0.55, 0.4], [0.55, 1, 0.4], [0.4, 0.4, 1]], [0.75, 0.75, 1.0])
    clean_s = [1.5] * 8 + [other_s]
    assert num_people(made, clean_s) == 1
    labels = people_of(made, clean_s, count=SpeakerCount(2, 2))
    assert (labels.count(labels[8]) == 1) == is_own
    assert (labels[0] != labels[4]) != is_own
