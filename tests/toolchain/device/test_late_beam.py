"""Searches on a device whose encodes and copies are late by chance."""

from collections.abc import Sequence

import pytest

from asr_server.core import DecodingOptions
from harness.engine_helpers import Checkpoint
from tests.unit.engine.device_stand_ins import imitate_late_device
from tests.unit.engine.test_beam import WIDTH, results_of_mixed
from tests.unit.engine.test_beam_boosted import BOOSTED, strong, tokens_of  # noqa: F401
from tests.unit.engine.test_engine import MIXED


@pytest.mark.slow
@pytest.mark.usefixtures("strong")
@pytest.mark.parametrize(
    ("asked", "seed"),
    [(MIXED, 0), (BOOSTED, 0), pytest.param(MIXED, 1, marks=pytest.mark.trial)],
    ids=["plain", "keywords", "plain 1"],
)
def test_a_search_is_the_same_on_a_device_that_is_late(
    pocket: Checkpoint, asked: Sequence[DecodingOptions], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = results_of_mixed(pocket.engine(beam_size=WIDTH), asked)
    imitate_late_device(monkeypatch, seed)
    found = results_of_mixed(pocket.engine(num_slots=4, beam_size=WIDTH), asked)
    assert tokens_of(found) == tokens_of(expected)
