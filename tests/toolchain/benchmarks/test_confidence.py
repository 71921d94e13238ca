"""The measures of the words' confidence, and its fit."""

from __future__ import annotations

import numpy as np
import pytest

from asr_server.transcription.confidence import FEATURES
from benchmarks.confidence import Words, auroc, calibration_error, fit

RNG = np.random.default_rng(3)


def test_auroc_is_the_share_of_pairs_in_the_right_order_and_equal_ones_count_half() -> None:
    probability = RNG.integers(0, 10, 60) / 10
    was_said = RNG.random(60) < 0.5
    pairs = [(a > b) + (a == b) / 2 for a in probability[was_said] for b in probability[~was_said]]
    assert auroc(probability, was_said) == pytest.approx(np.mean(pairs))


def test_the_calibration_error_is_the_distance_between_what_was_said_and_what_came_true() -> None:
    probability = np.array([0.85, 0.85, 0.85, 0.85, 0.25, 0.25])
    was_said = np.array([True, True, True, False, False, False])
    assert calibration_error(probability, was_said) == pytest.approx((4 * 0.10 + 2 * 0.25) / 6)


def test_the_fit_finds_the_model_that_made_the_words() -> None:
    num_words = 20_000
    evidence = RNG.normal(size=(num_words, len(FEATURES))) * RNG.uniform(0.5, 2, len(FEATURES))
    weights = RNG.normal(size=len(FEATURES))
    chance = 1 / (1 + np.exp(-(evidence @ weights - 0.5)))
    was_said = RNG.random(num_words) < chance
    number = np.zeros(num_words, int)
    found = fit(Words(evidence, was_said, chance, number, number))
    assert found.weights == pytest.approx(weights, abs=0.15)
    assert found.bias == pytest.approx(-0.5, abs=0.15)
