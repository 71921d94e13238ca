import itertools

import pytest

from asr_server.api.admission import AdmissionLimiter
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
    assert caught.value.retry_after_s == 1
    assert limiter.num_rejected == 1


@pytest.mark.parametrize(("stay_s", "retry_after_s"), [(0.0, 1), (10.0, 5), (10_000.0, 120)])
def test_retry_after_is_half_a_stay_within_what_clients_honour(stay_s: float, retry_after_s: int) -> None:
    ticks = itertools.count()
    limiter = AdmissionLimiter(1, clock=lambda: next(ticks) * stay_s)
    for _ in range(100):
        with limiter.acquire():
            pass
    assert limiter.retry_after_s == retry_after_s
