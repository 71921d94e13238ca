from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.reporting import Budget, command, error_bars, grid, spread


def test_a_grid_has_every_combination_the_last_axis_changing_fastest() -> None:
    assert grid([[1, 2], "ab"], one_at_a_time=False) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


def test_one_at_a_time_leaves_the_other_axes_at_their_first_values() -> None:
    assert grid([[1, 2], "ab", [7, 8]], one_at_a_time=True) == [
        (1, "a", 7), (1, "a", 8), (1, "b", 7), (2, "a", 7)
    ]  # fmt: skip


def test_axes_in_front_can_be_combined_in_full() -> None:
    points = grid(["xy", [1, 2], "ab"], one_at_a_time=True, num_full=1)
    assert [point for point in points if point[0] == "y"] == [("y", 1, "a"), ("y", 1, "b"), ("y", 2, "a")]


def test_a_budget_says_what_it_leaves_out() -> None:
    console = Console(file=io.StringIO(), width=200)
    budget = Budget(60, console)
    assert budget.allows("this")
    assert not budget.allows("what takes long", expected_s=120)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "left out, for want of time (--budget-s 60): what takes long\n"


def test_a_spread_names_the_median_and_the_ends() -> None:
    assert spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0 to 3.0)"
    assert error_bars([[3.0, 1.0, 2.5]]) == ([2.5], [[1.5], [0.5]])


def test_the_command_is_the_modules_name_with_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/engine.py", "--quick"])
    assert command() == "python -m benchmarks.engine --quick"
