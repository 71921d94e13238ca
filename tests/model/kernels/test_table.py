"""The choice at load, with stand-ins for kernels and clock."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.kernels.table import Candidate, choose


def kernel(*_: Any, **__: Any) -> Tensor:
    return torch.ones(3)


def candidate(found: Any = kernel, tolerance: float = 0.01) -> Candidate:
    return Candidate("flash_decode", found, lambda: torch.ones(3), tolerance)


def of_times(kernel_s: float, torch_s: float) -> Any:
    return lambda compute: kernel_s if compute is kernel else torch_s


def test_the_faster_one_is_taken_and_both_times_are_told() -> None:
    ours = Kernels(flash_decode=kernel)
    fast = choose(ours, [candidate()], of_times(0.001, 0.002))
    slow = choose(ours, [candidate()], of_times(0.002, 0.001))
    reports = (
        "flash_decode triton (triton 1.000 ms, torch 2.000 ms)",
        "flash_decode torch (triton 2.000 ms, torch 1.000 ms)",
    )
    assert fast == (ours, reports[0], {"flash_decode": ""})
    assert slow == (TORCH, reports[1], {"flash_decode": None})


def test_of_several_forms_the_fastest_that_is_right_is_taken() -> None:
    seconds = {"fast": 0.003, "wrong": 0.001, "fastest": 0.002, "slower than torch": 0.005}

    def compute(name: str) -> Tensor:
        return torch.zeros(3) if name == "wrong" else torch.ones(3)

    forms = [
        replace(candidate(partial(compute, name)), implementation=name, form=f" {name}") for name in seconds
    ]
    by_form = {each.kernel: seconds[each.implementation] for each in forms}
    chosen, report, names = choose(Kernels(flash_decode=kernel), forms, lambda call: by_form.get(call, 0.004))
    assert chosen == Kernels(flash_decode="fastest")  # type: ignore[arg-type]
    assert names == {"flash_decode": " fastest"}
    assert "flash_decode fastest triton (triton 2.000 ms, torch 4.000 ms)" in report
    slow = choose(Kernels(flash_decode=kernel), forms[-1:], lambda call: by_form.get(call, 0.004))
    assert slow.kernels == TORCH


def test_a_kernel_that_is_faster_by_noise_alone_is_not_taken() -> None:
    ours = Kernels(flash_decode=kernel)
    assert choose(ours, [candidate()], of_times(0.000975, 0.001)).kernels == TORCH
    assert choose(ours, [candidate()], of_times(0.000965, 0.001)).kernels == ours


def test_of_forms_that_differ_by_noise_alone_the_first_is_taken() -> None:
    seconds = {"first": 0.00100, "as fast": 0.00098, "faster": 0.00096}
    forms = [
        replace(candidate(partial(torch.ones, 3)), implementation=name, form=f" {name}") for name in seconds
    ]
    by_form = {each.kernel: seconds[each.implementation] for each in forms}
    for tried, expected in ((forms[:2], "first"), (forms, "faster")):
        chosen = choose(Kernels(flash_decode=kernel), tried, lambda call: by_form.get(call, 0.004)).kernels
        assert chosen == Kernels(flash_decode=expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [0.02, float("nan"), float("inf")])
def test_a_kernel_that_disagrees_is_not_used_however_fast(off: float) -> None:
    wrong = candidate(lambda: torch.tensor([1.0, 1.0, 1.0 + off]))
    kernels, report, _ = choose(Kernels(flash_decode=kernel), [wrong], of_times(0, 1))
    assert kernels == TORCH
    assert "differs by" in report


@pytest.mark.parametrize("error", [RuntimeError("no\ncompiler"), FileNotFoundError("gcc"), AssertionError()])
def test_a_kernel_that_does_not_compile_is_not_used(error: Exception) -> None:
    def fail() -> Tensor:
        raise error

    kernels, report, forms = choose(Kernels(flash_decode=kernel), [candidate(fail)], of_times(0, 1))
    assert kernels == TORCH
    assert forms is None, "the next start may have a compiler"
    assert type(error).__name__ in report
    assert "\n" not in report


@pytest.mark.parametrize(("off", "is_used"), [(0.5, True), (0.75, False)])
def test_a_kernel_may_be_off_by_the_tolerance_and_no_more(off: float, is_used: bool) -> None:
    tried = candidate(lambda: torch.ones(3) + off, tolerance=0.5)
    ours = Kernels(flash_decode=kernel)
    found = choose(ours, [tried], lambda call: float(call is not tried.kernel)).kernels
    assert found == (ours if is_used else TORCH)


def test_an_errors_first_120_letters_are_reported() -> None:
    def fail() -> Tensor:
        raise RuntimeError("x" * 200)

    _, report, _ = choose(Kernels(flash_decode=kernel), [candidate(fail)], of_times(0, 1))
    assert report.count("x") == 120


@pytest.mark.parametrize("record", [TORCH, candidate()])
def test_neither_kernels_nor_candidates_change(record: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        record.name = record.advance = None
