"""Not one word of what nobody says: a real server, the embedded model, noises of every kind and level."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest
from openai import AsyncOpenAI

from tests.contract.official_client import transcribe
from tests.support.noises import KINDS, make_noise
from tests.unit.api.sample_files import sound_file

LEVELS_DB: Final = (-50, -40, -30, -20, -10)
AT_ONCE: Final = 3


async def words_of(
    client: AsyncOpenAI, sounds: list[tuple[str, int, float, int]]
) -> dict[tuple[str, int, float, int], str]:
    """The texts that are not empty, by kind, level, length and seed of the noise."""
    places = asyncio.Semaphore(AT_ONCE)

    async def text_of(sound: tuple[str, int, float, int]) -> str:
        async with places:
            return str((await transcribe(client, sound_file(make_noise(*sound)))).text)

    texts = await asyncio.gather(*(text_of(sound) for sound in sounds))
    return {sound: text for sound, text in zip(sounds, texts, strict=True) if text}


async def test_a_few_seconds_of_each_kind_of_noise_give_not_one_word(client: AsyncOpenAI) -> None:
    assert await words_of(client, [(kind, -30, 4.0, 3) for kind in KINDS]) == {}


@pytest.mark.trial
@pytest.mark.timeout(3600)
async def test_50_minutes_of_noises_at_all_levels_give_not_one_word(client: AsyncOpenAI) -> None:
    sounds = [(kind, level, 20.0, seed) for kind in KINDS for level in LEVELS_DB for seed in range(3)]
    assert await words_of(client, sounds) == {}
