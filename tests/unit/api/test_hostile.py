"""Damaged files and files that mean harm, as uploads: each is refused or heard, and the server serves on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.embedded import embedded
from tests.unit.api.running_app import RunningApp, run_app
from tests.unit.audio.hostile import mutated
from tests.unit.audio.test_hostile import MIB, flac_header, originals, silent_opus
from tests.unit.audio.test_native_wav import raw_wav


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_upload", "limit"),
    [
        (partial(silent_opus, 120), "100 s, set by --max-audio-s"),
        (partial(flac_header, 655_350, 8), "384000 Hz"),
    ],
    ids=["length", "rate"],
)
async def test_a_bomb_is_refused_with_its_limit(make_upload: Callable[[], bytes], limit: str) -> None:
    async with run_app(embedded(max_audio_s=100.0)) as app:
        reply = await app.post(make_upload())
        assert 400 <= reply.status_code < 500
        assert reply.json()["error"]["param"] == "file"
        assert limit in reply.json()["error"]["message"]
        assert await app.still_works()


async def test_a_wav_that_claims_4_gb_is_heard_as_far_as_it_goes(app: RunningApp) -> None:
    reply = await app.post(raw_wav(bytes(range(256)) * 625, data_size=0xFFFFFFF0))
    assert reply.json()["text"] == "zero"
    assert await app.still_works()


@pytest.mark.slow
async def test_mutated_uploads_are_heard_or_refused(app: RunningApp, tmp_path: Path) -> None:
    statuses = {
        (await app.post(upload)).status_code for _, upload in mutated(originals(tmp_path), 60, seed=4)
    }
    assert statuses == {200, 400}
    assert await app.still_works()


@pytest.mark.trial
@pytest.mark.timeout(900)
async def test_24_mib_of_silent_opus_are_refused_within_bounds() -> None:
    hour = silent_opus(3600)
    async with run_app() as app:
        app.client.timeout = 600
        reply = await app.post(hour * (24 * MIB // len(hour)))
        assert 400 <= reply.status_code < 500
        assert "--max-" in reply.json()["error"]["message"]
        assert await app.still_works()
