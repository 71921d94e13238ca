import pytest

from asr_server.api.state import AdmissionLimiter
from asr_server.errors import Overloaded


def test_a_place_is_free_again_whatever_happened_in_it() -> None:
    limiter = AdmissionLimiter(1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limiter.acquire():
            _ = limiter.num_in_flight / (limiter.num_in_flight - 1)
    assert limiter.num_in_flight == 0


def test_who_comes_when_it_is_full_is_told_when_to_come_back() -> None:
    limiter = AdmissionLimiter(1)
    with limiter.acquire():
        with pytest.raises(Overloaded, match="max-concurrent-requests") as caught, limiter.acquire():
            pass
        assert limiter.num_in_flight == 1
    assert 0 < caught.value.retry_after_s <= 120
    assert limiter.num_rejected == 1


def turned_away(limiter: AdmissionLimiter) -> float:
    with pytest.raises(Overloaded) as caught, limiter.enter():
        pass
    return caught.value.retry_after_s


def test_nobody_is_asked_back_within_a_second_or_after_two_minutes() -> None:
    now_s = 0.0
    limiter = AdmissionLimiter(4, clock=lambda: now_s)
    with limiter.acquire(), limiter.acquire(), limiter.acquire(), limiter.acquire():
        assert turned_away(limiter) == 1.0
        now_s = 1000.0
        assert turned_away(limiter) == 120.0


def test_turns_come_as_fast_as_places_became_free_while_all_were_taken() -> None:
    now_s = 0.0
    limiter = AdmissionLimiter(2, clock=lambda: now_s)
    for _ in range(3):  # quick ones, while there is room: they tell nothing
        with limiter.acquire():
            now_s += 0.01
    with limiter.acquire():
        for _ in range(20):
            with limiter.acquire():
                now_s += 3.0
        with limiter.acquire():
            turns_s = [turned_away(limiter) for _ in range(3)]
    assert turns_s == pytest.approx([1.0, 5.5, 10.0])


def test_a_burst_on_a_quiet_server_finds_places_within_three_tries() -> None:
    """The first place becomes free after 2.5 s, long after any request before."""
    now_s = 0.0
    limiter = AdmissionLimiter(1, clock=lambda: now_s)
    with limiter.acquire():
        for _ in range(2):
            now_s += turned_away(limiter)
    assert now_s > 2.5


def test_each_who_is_turned_away_gets_a_turn_of_its_own_at_the_rate_at_which_requests_finish() -> None:
    limiter = AdmissionLimiter(4, clock=lambda: 0.0)
    with limiter.acquire(), limiter.acquire(), limiter.acquire(), limiter.acquire():
        turns_s = [turned_away(limiter) for _ in range(1000)]
    assert turns_s[:3] == pytest.approx([1.0, 1.375, 1.75])
    assert turns_s[-1] == 120


def test_requests_that_take_longer_than_any_before_lengthen_the_wait_before_they_end() -> None:
    now_s = 0.0
    limiter = AdmissionLimiter(1, clock=lambda: now_s)
    with limiter.acquire():
        now_s = 30.0
        assert turned_away(limiter) == 90.0
