"""Who is one person: clusters of embeddings made up around known voices."""

from typing import Any

import numpy as np
import pytest

from asr_server.annexes.speakers import clustering
from asr_server.annexes.speakers.clustering import cluster as find_clusters
from asr_server.annexes.speakers.clustering import directions, name_known
from asr_server.core import SpeakerCount

SIZE = 192


def voices(num_people: int, num_each: int, spread: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """[num_people * num_each, 192] of length 1, one person after another in turns, and whose each is."""
    rng = np.random.default_rng(3)
    centres = np.linalg.qr(rng.standard_normal((SIZE, num_people)))[0].T
    people = np.tile(np.arange(num_people), num_each)
    noise = rng.standard_normal((len(people), SIZE)) / np.sqrt(SIZE)
    embeddings = centres[people] + spread * noise
    return (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)).astype(np.float32), people


def cluster(*args: Any, **named: Any) -> np.ndarray:
    return find_clusters(*args, **named).labels


def is_same_partition(labels: np.ndarray, people: np.ndarray) -> bool:
    pairs = set(zip(labels.tolist(), people.tolist(), strict=True))
    return len(pairs) == len(set(labels.tolist())) == len(set(people.tolist()))


def test_the_number_of_people_is_found() -> None:
    for num_people in (1, 2, 5):
        embeddings, people = voices(num_people, 12)
        labels = cluster(embeddings, np.full(len(people), 3.0), np.arange(len(people)), SpeakerCount())
        assert is_same_partition(labels, people)


def test_two_of_one_window_are_two_people_however_alike() -> None:
    first, second = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, 2)))[0].T
    pair = np.stack([first, 0.55 * first + np.sqrt(1 - 0.55**2) * second]).astype(np.float32)
    embeddings, clean_s = np.tile(pair, (10, 1)), np.full(20, 3.0)
    assert len(set(cluster(embeddings, clean_s, np.arange(20), SpeakerCount()).tolist())) == 1
    labels = cluster(embeddings, clean_s, np.repeat(np.arange(10), 2), SpeakerCount())
    assert is_same_partition(labels, np.tile([0, 1], 10))


def test_where_all_voices_are_more_alike_two_people_are_told_apart_at_a_higher_cosine() -> None:
    """As on a telephone; one of them speaks in each window, so that no window tells them apart."""
    first, second = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, 2)))[0].T
    pair = np.stack([first, 0.56 * first + np.sqrt(1 - 0.56**2) * second]).astype(np.float32)
    embeddings, people = np.tile(pair, (10, 1)), np.tile([0, 1], 10)
    for alike, num_people in (([], 1), ([0.55] * 20, 1), ([0.95] * 20, 2)):
        labels = cluster(embeddings, np.full(20, 3.0), np.arange(20), SpeakerCount(), alike)
        assert len(set(labels.tolist())) == num_people
    assert is_same_partition(labels, people)


def test_one_person_who_goes_on_by_telephone_is_one_but_another_caller_is_not() -> None:
    first, second = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, 2)))[0].T
    people = np.repeat([0, 1], 10)
    for cosine, narrow, num_people in ((0.5, people > 0, 1), (0.5, people > 1, 2), (0.42, people > 0, 2)):
        pair = np.stack([first, cosine * first + np.sqrt(1 - cosine**2) * second]).astype(np.float32)
        labels = cluster(
            pair[people], np.full(20, 3.0), np.arange(20), SpeakerCount(), [0.95] * 20, narrow=narrow
        )
        assert len(set(labels.tolist())) == num_people


def test_one_person_who_is_taken_for_two_in_each_window_is_one() -> None:
    """And says the same again and again, as an announcement does: every two voices are alike."""
    sayings, _ = voices(1, 3, spread=0.62)
    embeddings, windows = np.tile(sayings, (10, 1)), np.repeat(np.arange(15), 2)
    labels = cluster(embeddings, np.full(30, 3.0), windows, SpeakerCount(), [0.95] * 20)
    assert set(labels.tolist()) == {0}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a block takes grows with the third power of its size."""
    monkeypatch.setattr(clustering, "BLOCK", clustering.BLOCK // 5)


@pytest.mark.usefixtures("small_blocks")
def test_more_voices_than_one_block_are_clustered_alike() -> None:
    embeddings, people = voices(3, 100)
    labels = cluster(embeddings, np.full(len(people), 3.0), np.arange(len(people)), SpeakerCount())
    assert is_same_partition(labels, people)


def test_a_count_that_is_given_is_kept() -> None:
    embeddings, people = voices(4, 10)
    for least, most in ((2, 2), (1, 3), (6, 6)):
        labels = cluster(
            embeddings, np.full(len(people), 3.0), np.arange(len(people)), SpeakerCount(least, most)
        )
        assert least <= len(set(labels.tolist())) <= most


def test_a_count_that_is_given_is_not_spent_on_a_sound_that_is_like_nobody() -> None:
    embeddings, people = voices(3, 12)
    of_two = np.flatnonzero(people < 2)
    chosen = [*of_two, int(np.flatnonzero(people == 2)[0])]
    labels = cluster(embeddings[chosen], np.full(25, 3.0), np.arange(25), SpeakerCount(2, 2))
    assert is_same_partition(labels[:-1], people[of_two])


def test_two_people_of_like_voices_are_told_apart_where_two_are_asked_for() -> None:
    embeddings, people = voices(2, 12, spread=0.2)
    alike = embeddings + 1.6 * embeddings[people == 0].mean(axis=0)
    alike /= np.linalg.norm(alike, axis=1, keepdims=True)
    clean_s, windows = np.full(len(people), 3.0), np.arange(len(people))
    assert len(set(cluster(alike, clean_s, windows, SpeakerCount()).tolist())) == 1
    assert is_same_partition(cluster(alike, clean_s, windows, SpeakerCount(2, 2)), people)


@pytest.mark.usefixtures("small_blocks")
def test_of_hours_of_one_voice_two_are_made_where_two_are_asked_for() -> None:
    embeddings, people = voices(1, 300, spread=0.75)
    labels = cluster(embeddings, np.full(len(people), 3.0), np.arange(len(people)), SpeakerCount(2, 2))
    assert len(set(labels.tolist())) == 2


def test_a_reference_of_a_stranger_is_nobody_s() -> None:
    embeddings, people = voices(3, 10)
    references = np.stack([embeddings[1], voices(3, 1, 9.0)[0][0]])
    groups = [np.flatnonzero(people == person) for person in range(3)]
    means = directions(groups, embeddings, np.full(len(people), 3.0))
    assert name_known(means, [*references]) == {1: 0}


def talk(num_main: int, num_other: int, other_s: float, cosine: float = 0.1) -> tuple[Any, ...]:
    """Return one person's voices and a few short ones of another, as arguments of `cluster`."""
    first, second = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, 2)))[0].T
    pair = np.stack([first, cosine * first + np.sqrt(1 - cosine**2) * second])
    people = np.array([0] * num_main + [1] * num_other)
    noise = np.random.default_rng(2).standard_normal((len(people), SIZE)) / np.sqrt(SIZE)
    embeddings = pair[people] + 0.7 * noise
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings.astype(np.float32), np.where(people, other_s, 2.5), np.arange(len(people)), people


def test_of_a_short_recording_whoever_says_a_few_seconds_is_a_person_if_unlike_the_other() -> None:
    for num_main, num_other, cosine, num_people in ((2, 1, 0.1, 2), (9, 1, 0.1, 2), (9, 1, 0.5, 1)):
        embeddings, clean_s, windows, people = talk(num_main, num_other, 2.5, cosine)
        labels = cluster(embeddings, clean_s, windows, SpeakerCount())
        assert len(set(labels.tolist())) == num_people
        assert num_people == 1 or is_same_partition(labels, people)


def test_of_a_long_recording_a_sound_of_seconds_is_no_person() -> None:
    embeddings, clean_s, windows, _ = talk(300, 1, 2.5)
    assert set(cluster(embeddings, clean_s, windows, SpeakerCount()).tolist()) == {0}


def test_two_that_are_asked_for_are_not_halves_of_one_where_another_says_a_little() -> None:
    embeddings, clean_s, windows, people = talk(20, 3, 1.0)
    assert set(cluster(embeddings, clean_s, windows, SpeakerCount()).tolist()) == {0}
    assert is_same_partition(cluster(embeddings, clean_s, windows, SpeakerCount(2, 2)), people)


def test_where_more_are_found_than_asked_for_who_says_little_is_given_up_and_not_two_who_say_much() -> None:
    embeddings, people = voices(2, 20)
    sound = np.linalg.qr(np.random.default_rng(9).standard_normal((SIZE, 1)))[0].T
    embeddings[people == 1] += 0.5 * embeddings[people == 0].mean(axis=0)
    embeddings = np.concatenate([embeddings, sound]).astype(np.float32)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    clean_s, windows = np.full(41, 2.5), np.arange(41)
    assert len(set(cluster(embeddings, clean_s, windows, SpeakerCount()).tolist())) == 3
    labels = cluster(embeddings, clean_s, windows, SpeakerCount(2, 2))
    assert is_same_partition(labels[:-1], people)


def test_a_reference_finds_its_person_in_a_few_short_words() -> None:
    embeddings, clean_s, windows, people = talk(20, 3, 1.0)
    first, second = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, 2)))[0].T
    stranger = np.linalg.qr(np.random.default_rng(5).standard_normal((SIZE, 1)))[0].T[0]
    found = find_clusters(embeddings, clean_s, windows, SpeakerCount(), references=[stranger, second, first])
    assert is_same_partition(found.labels, people)
    assert found.known == {int(found.labels[0]): 2, int(found.labels[-1]): 1}
