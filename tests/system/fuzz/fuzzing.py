"""Runs properties for minutes, in passes of Hypothesis whose seeds follow one another."""

import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import Final, TypeVar

import hypothesis
import psutil
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy, binary, integers, lists, one_of, sampled_from

from asr_server.config import MIB

MINUTES: Final = float(os.environ.get("ASR_TEST_FUZZ_MINUTES", "8.5"))  # of each kind
FIRST_SEED: Final = int(os.environ.get("ASR_TEST_FUZZ_SEED", "0"))
EXAMPLES: Final = 200  # of a pass
ANSWER_LIMIT_S: Final = 20.0  # a server that takes longer hangs
MOST_GROWTH_BYTES: Final = 48 * MIB

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., object])


def fuzzing(test: Test) -> Test:
    """Mark a trial that may print a long example where it fails."""
    pytest.mark.filterwarnings("ignore:Generating overly large repr")(test)
    pytest.mark.trial(test)
    return test


def fuzz(examples: SearchStrategy[T], check: Callable[[T], None], process: psutil.Process) -> None:
    """Check examples until the time is over; a failure names the seed of its pass. `process` may not grow."""
    end = time.monotonic() + 60 * MINUTES
    before = 0
    for seed in itertools.count(FIRST_SEED):
        try:
            _pass(seed, examples, check)
        except BaseException as error:
            error.add_note(f"ASR_TEST_FUZZ_SEED={seed}")
            raise
        if seed == FIRST_SEED:
            before = process.memory_full_info().uss  # what is loaded at its first use is there
        if time.monotonic() > end:
            break
    print(f"{seed + 1 - FIRST_SEED} passes of {EXAMPLES} examples")
    assert process.memory_full_info().uss < before + MOST_GROWTH_BYTES


def _pass(seed: int, examples: SearchStrategy[T], check: Callable[[T], None]) -> None:
    settings = hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )

    @hypothesis.seed(seed)
    @settings
    @hypothesis.given(example=examples)
    def run(example: T) -> None:
        check(example)

    run()


def pieces_of(*known: bytes, most: int = 12) -> SearchStrategy[bytes]:
    """Bytes put together from known pieces and noise."""
    piece = one_of(sampled_from(known), sampled_from(known), binary(max_size=20))
    return lists(piece, max_size=most).map(b"".join)


def damaged(whole: bytes) -> SearchStrategy[bytes]:
    """`whole` with a part replaced, left out or cut off."""

    def damage(cut: int, skip: int, junk: bytes) -> bytes:
        return whole[:cut] + junk + whole[cut + skip :]

    places = integers(0, len(whole))
    return hypothesis.strategies.builds(damage, places, integers(0, 40) | places, binary(max_size=20))


def answer_to(address: tuple[str, int], data: bytes) -> bytes:
    """All that a server sends to who sends these bytes and no more, until it closes the connection."""
    with socket.create_connection(address, timeout=ANSWER_LIMIT_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        except (ConnectionError, BrokenPipeError):
            pass  # it closes on what it refuses
        return answer
