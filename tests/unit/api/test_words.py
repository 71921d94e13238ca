"""Word times end to end: the official client, a real server, the embedded model, digits of known times."""

from __future__ import annotations

from typing import Any

import numpy as np
from openai import AsyncOpenAI

from tests.contract.official_client import SPOKEN, transcribe
from tests.support.speech import Spoken, say, silence
from tests.unit.api.sample_files import sound_file

NEAR_S = 0.1
WORDS: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
# From one voice to the next, close together and far apart.
SAID = [
    say("20717", "f3", gap_s=[0.1, 0.3, 0.9, 0.2, 0.3]),
    say("38146", "linda", gap_s=[0.2, 0.1, 0.2, 0.7, 0.3]),
    say("4907", "rms", gap_s=[0.4, 0.15, 0.25, 0.3]),
]


async def times_of(client: AsyncOpenAI, file: bytes) -> list[tuple[str, float, float]]:
    answer = await transcribe(client, file, **WORDS)
    assert answer.segments is None
    assert answer.text == " ".join(word.word for word in answer.words)
    return [(word.word, word.start, word.end) for word in answer.words]


def off_by(found: list[tuple[str, float, float]], spoken: list[Spoken], first_s: list[float]) -> list[float]:
    """The larger of a word's two errors in seconds, for each word that was heard as what it is."""
    truth = [
        (name, start + at_s, end + at_s)
        for said, at_s in zip(spoken, first_s, strict=True)
        for name, (start, end) in zip(said.text.split(), said.times, strict=True)
    ]
    right = [(f, t) for f, t in zip(found, truth, strict=True) if f[0] == t[0]]
    assert len(right) >= 0.9 * len(truth)
    return [max(abs(f[1] - t[1]), abs(f[2] - t[2])) for f, t in right]


async def test_words_lie_where_they_were_said_at_minute_0_and_at_minute_20(client: AsyncOpenAI) -> None:
    """Nobody speaks in between, or the test would take its time."""
    wait = silence(20 * 60)
    samples = np.concatenate([*(said.samples for said in SAID), wait, *(said.samples for said in SAID)])
    starts_s = np.cumsum([0.0, *(len(said.samples) / 16_000 for said in SAID)]).tolist()
    again_s = [starts_s[-1] + len(wait) / 16_000 + start_s for start_s in starts_s[:-1]]
    found = await times_of(client, sound_file(samples, "FLAC"))
    half = len(found) // 2
    early = off_by(found[:half], SAID, starts_s[:-1])
    late = off_by(found[half:], SAID, again_s)
    assert np.mean(np.array([*early, *late]) <= NEAR_S) >= 0.95
    assert abs(np.median(early) - np.median(late)) < 0.01, "they drift"


async def test_words_lie_where_they_were_said_though_noise_fills_the_pauses(client: AsyncOpenAI) -> None:
    samples = np.concatenate([said.samples for said in SAID])
    loudness = float(np.std(samples[samples != 0]))
    noise = np.random.default_rng(0).normal(0, loudness * 10 ** (-30 / 20), len(samples))
    starts_s = np.cumsum([0.0, *(len(said.samples) / 16_000 for said in SAID)]).tolist()
    found = await times_of(client, sound_file((samples + noise).astype(np.float32), "FLAC"))
    assert np.mean(np.array(off_by(found, SAID, starts_s[:-1])) <= NEAR_S) >= 0.9


async def test_both_granularities_give_words_within_their_segments(client: AsyncOpenAI) -> None:
    answer = await transcribe(
        client,
        sound_file(SPOKEN.samples),
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert len(answer.segments) == 2
    assert [word.word for word in answer.words] == SPOKEN.text.split()
    for segment in answer.segments:
        inside = [word for word in answer.words if segment.start - 0.2 < word.start < segment.end]
        assert [word.word for word in inside] == segment.text.split()
    times = [time for word in answer.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= answer.duration
