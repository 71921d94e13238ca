"""The numbers of a run, and its exit status."""

from __future__ import annotations

import pytest

from asr_server.offline.inputs import Failure
from asr_server.offline.progress import SOME_FAILED, SUCCESS, Summary, speed_of

FAILED = [Failure("b.wav", "damaged")]


@pytest.mark.parametrize(
    ("summary", "numbers"),
    [
        (Summary(), "nothing to do"),
        (Summary(3, num_skipped=3), "3 skipped"),
        (Summary(1, 1, elapsed_s=2.0), "1 transcribed; 0.0 s of audio in 2.0 s (0.0 x)"),
        (
            Summary(9, 4, 2, audio_s=90.0, elapsed_s=10.0, failures=FAILED),
            "4 transcribed, 2 skipped, 1 failed, 2 not begun or not finished; "
            "90.0 s of audio in 10.0 s (9.0 x)",
        ),
    ],
)
def test_every_input_is_counted_once(summary: Summary, numbers: str) -> None:
    assert summary.numbers() == numbers


def test_a_failure_or_what_ended_the_run_is_its_status() -> None:
    assert (SUCCESS, SOME_FAILED) == (0, 1)
    assert Summary(1, 1).exit_status == SUCCESS
    assert Summary(1, failures=FAILED).exit_status == SOME_FAILED
    assert Summary(1, failures=FAILED, stop_status=130).exit_status == 130


@pytest.mark.parametrize(
    ("summary", "quiet", "lines"),
    [
        (Summary(1, 1, audio_s=1.0, elapsed_s=1.0), False, []),
        (Summary(2, 2, 0, 2.0, 1.0), False, ["2 transcribed; 2.0 s of audio in 1.0 s (2.0 x)"]),
        (Summary(1, num_skipped=1), False, ["1 skipped"]),
        (Summary(2, 1, failures=FAILED), True, ["failed: b.wav: damaged"]),
        (Summary(1, failures=FAILED), False, ["failed: b.wav: damaged", "1 failed"]),
        (Summary(stop_reason="interrupted"), True, ["stopped: interrupted"]),
        (
            Summary(1, 1, cut_short=["a"], unheard=["a: no speech"]),
            True,
            [
                "warning: a: damaged or cut short; what could be read is transcribed",
                "warning: a: no speech",
            ],
        ),
    ],
)
def test_warnings_and_failures_are_always_shown_and_numbers_where_they_say_more(
    summary: Summary, quiet: bool, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary.show(quiet)
    assert capsys.readouterr().err.splitlines() == lines


def test_a_speed_says_how_many_times_real_time_it_is() -> None:
    assert speed_of(30.0, 4.0) == "30.0 s of audio in 4.0 s (7.5 x)"
