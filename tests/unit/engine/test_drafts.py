"""A draft saves steps and changes no text, whatever it says."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from asr_server.core import ChunkResult, DecodingOptions
from asr_server.transport.messages import Event
from harness.engine_helpers import results, run, submit
from tests.unit.engine.small import SPECIALS, VOCABULARY, clip, small

PLAIN = DecodingOptions(language="de", compression_ratio_threshold=99.0, logprob_threshold=-99.0)
CLIPS = [clip(seed, duration_s) for seed, duration_s in enumerate((3.0, 0.6, 2.0, 1.2, 2.5, 0.8))]
TIMES = range(SPECIALS.timestamp_begin, VOCABULARY)


def read(drafts: Sequence[tuple[int, ...]], **config: Any) -> tuple[list[ChunkResult], int]:
    """Return all clips' results, and the steps that they took."""
    engine = small().engine(num_slots=4, **config)
    for number, (samples, draft) in enumerate(zip(CLIPS, drafts, strict=True)):
        submit(engine, str(number), samples, replace(PLAIN, draft_tokens=draft))
    found = results(run(engine))
    assert engine.slots_in_use == 0
    return [found[str(number)] for number in range(len(CLIPS))], engine.heartbeat().num_decode_steps


def spoil(tokens: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    """Change, drop and add tokens and times, as an earlier reading of a shorter turn may have them."""
    spoilt = list(tokens)
    for _ in range(chance.randrange(4)):
        place = chance.randrange(len(spoilt) + 1)
        new = [chance.choice(TIMES) if chance.random() < 0.5 else chance.randrange(100, SPECIALS.end_of_text)]
        spoilt[place : place + chance.randrange(3)] = new * chance.randrange(3)
    return tuple(spoilt)


@pytest.mark.parametrize(
    ("beam_size", "lookahead", "short_audio", "num_spoilt"),
    [(1, True, "exact", 1), (5, False, "exact", 1), (5, True, "tail", 2)],
)
def test_texts_with_drafts_are_those_without(
    beam_size: int, lookahead: bool, short_audio: str, num_spoilt: int
) -> None:
    config: dict[str, Any] = {"beam_size": beam_size, "lookahead": lookahead, "short_audio": short_audio}
    expected, num_steps = read([()] * len(CLIPS), **config)
    right = [result.tokens for result in expected]
    chance = random.Random(5)
    for drafts in (
        right,
        right[::-1],
        *([spoil(draft, chance) for draft in right] for _ in range(num_spoilt)),
    ):
        found, num_with_drafts = read(drafts, **config)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-4)
            assert ours.no_speech_prob == pytest.approx(theirs.no_speech_prob, abs=1e-4)
        if drafts is right and beam_size == 1:
            assert num_with_drafts < num_steps / 4


@pytest.mark.parametrize("seed", [8, 18])
def test_a_chunk_that_moves_while_its_draft_is_checked_loses_nothing(seed: int) -> None:
    """Chunks come a few steps after one another, so that one ends while another's draft is in flight."""
    chance = random.Random(seed)
    clips = [clip(chance.randrange(50), chance.choice([0.6, 1.0, 2.0, 3.0])) for _ in range(8)]
    steps_between = [chance.randrange(6) for _ in clips]

    def read_in_turn(drafts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        engine = small().engine(num_slots=4, lookahead=True)
        events: list[Event] = []
        for number, (samples, draft) in enumerate(zip(clips, drafts, strict=True)):
            submit(engine, str(number), samples, replace(PLAIN, draft_tokens=draft))
            for _ in range(steps_between[number]):
                events += engine.step()
        found = results([*events, *run(engine)])
        return [found[str(number)].tokens for number in range(len(clips))]

    expected = read_in_turn([()] * len(clips))
    drafts = [spoil(tokens, chance) if chance.random() < 0.5 else tokens for tokens in expected]
    assert read_in_turn(drafts) == expected
