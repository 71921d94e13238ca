"""Codes of G.711 by its tables: zero, the faintest and the loudest of both signs."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from asr_server.realtime.g711 import A_LAW, MU_LAW, Table

FULL_SCALE = 32768


@pytest.mark.parametrize(
    ("table", "levels"),
    [
        (MU_LAW, {0xFF: 0, 0x7F: 0, 0xFE: 8, 0x80: 32_124, 0x00: -32_124, 0x8F: 16_764}),
        (A_LAW, {0xD5: 8, 0x55: -8, 0xD4: 24, 0xAA: 32_256, 0x2A: -32_256, 0xC5: 264}),
    ],
)
def test_a_code_is_its_level(table: Table, levels: dict[int, int]) -> None:
    assert {code: int(table[code] * FULL_SCALE) for code in levels} == levels


@pytest.mark.parametrize(("table", "subtype"), [(MU_LAW, "ULAW"), (A_LAW, "ALAW")])
def test_each_code_has_the_level_that_libsndfile_gives_it(table: Table, subtype: str) -> None:
    codes = io.BytesIO(bytes(range(256)))
    expected, _ = soundfile.read(
        codes, dtype="float32", format="RAW", subtype=subtype, samplerate=8000, channels=1
    )
    assert np.array_equal(table, expected)
