"""Damaged files and files that mean harm, as uploads: each is refused or heard, and the server serves on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asr_server.config import Settings
from tests.api.house import House, open_house
from tests.audio.hostile import mutated
from tests.audio.test_hostile import MIB, flac_header, originals, silent_opus
from tests.audio.test_wav import raw_wav


@pytest.mark.parametrize(
    ("upload", "limits"),
    [
        (silent_opus(600), {"max_audio_s": 300.0}),
        (silent_opus(600), {"max_decoded_bytes": 300 * 48_000 * 4}),
        (flac_header(655_350, 8), {"max_sample_rate": 384_000}),
    ],
    ids=["hours", "gigabytes", "rate"],
)
async def test_a_bomb_is_refused_with_the_limit_s_name(upload: bytes, limits: dict[str, Any]) -> None:
    async with open_house(replace(Settings(), **limits)) as house:
        reply = await house.post(upload)
        assert 400 <= reply.status_code < 500
        assert reply.json()["error"]["param"] == "file"
        (setting,) = limits
        assert f"--{setting.replace('_', '-')}" in reply.json()["error"]["message"]
        assert await house.hears()


async def test_a_wav_that_claims_4_gb_is_heard_as_far_as_it_goes(house: House) -> None:
    reply = await house.post(raw_wav(bytes(range(256)) * 625, data_size=0xFFFFFFF0))
    assert reply.json()["text"] == "zero"
    assert await house.hears()


async def test_mutated_uploads_are_heard_or_refused(house: House, tmp_path: Path) -> None:
    statuses = {
        (await house.post(upload)).status_code for _, upload in mutated(originals(tmp_path), 60, seed=4)
    }
    assert statuses == {200, 400}
    assert await house.hears()


@pytest.mark.trial
@pytest.mark.timeout(900)
async def test_24_mib_of_silent_opus_are_refused_within_bounds() -> None:
    hour = silent_opus(3600)
    async with open_house() as house:
        house.client.timeout = 600
        reply = await house.post(hour * (24 * MIB // len(hour)))
        assert 400 <= reply.status_code < 500
        assert "--max-" in reply.json()["error"]["message"]
        assert await house.hears()
