"""Choose an implementation for each computation when a model is loaded.

Kernels are compared with torch on random data, and timed. Knows neither Triton nor a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

# A challenger must win by this: by noise alone, two replicas would choose differently and round differently.
MARGIN = 0.03

FEW_ROWS = 8  # for which kernels may have forms of their own

NUM_WARPS = (2, 1, 4)  # of a program of flash_decode, that are worth trying; the first where none is tried


@dataclass(frozen=True)
class Kernels:
    """The kernels in use, named as the functions; None: torch's operations."""

    flash_decode: Callable[..., Tensor] | None = None
    choose_token: Callable[..., None] | None = None
    advance: Callable[..., None] | None = None
    add_norm: Callable[..., tuple[Tensor, Tensor]] | None = None
    linear_gelu: Callable[..., Tensor] | None = None
    quantise_rows: Callable[..., tuple[Tensor, Tensor]] | None = None
    whole_attention: Callable[..., Tensor] | None = None  # of the encoder, with no silence behind the audio
    row_lengths: Callable[..., tuple[Tensor, ...]] | None = None
    norm_product: Callable[..., tuple[Tensor, Tensor]] | None = None  # these two of one row
    row_product: Callable[..., Tensor] | None = None
    flash_decode_few: Callable[..., Tensor] | None = None  # these two for few rows; None: as for many
    choose_token_few: Callable[..., None] | None = None


TORCH = Kernels()


@dataclass(frozen=True)
class Candidate:
    name: str  # a field of `Kernels`
    kernel: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    tolerance: float  # greatest difference of any number
    implementation: Any = None  # what `Kernels` gets; None: the kernel that it has
    form: str = ""  # of a kernel that there are several of
    maker: str = "triton"
    beside: str = "torch"  # who computes the reference
    checked_too: Candidate | None = None  # the same kernel on other shapes, where its numbers must be right


class Verdict(NamedTuple):
    seconds: float  # a call; infinite where torch is the better
    reason: str  # with both times, or why there are none
    has_failed: bool = False  # with an error, which another start may not meet


Forms = dict[str, str | None]  # of each kernel that was tried the form that won; None: torch


class Choice(NamedTuple):
    kernels: Kernels
    report: str  # one line for the log; empty where there was nothing to choose
    forms: Forms | None = None  # None: nothing to remember


Timer = Callable[[Callable[[], Tensor]], float]  # seconds that a call takes


def judge(candidate: Candidate, time_s: Timer) -> Verdict:
    # Whatever goes wrong in a compiler, a driver or a kernel, torch can do the same.
    try:
        for checked in filter(None, (candidate, candidate.checked_too)):
            error = float((checked.kernel().float() - checked.reference().float()).abs().max())
            if not error <= checked.tolerance:
                reason = f"{checked.maker} differs by {error:.2g}, more than {checked.tolerance:g}"
                return Verdict(inf, f"{candidate.beside}: {reason}")
        kernel_s, reference_s = time_s(candidate.kernel), time_s(candidate.reference)
    except Exception as failure:
        reason = f"{candidate.beside}: {candidate.maker} failed with {_one_line(failure)}"
        return Verdict(inf, reason, has_failed=True)
    times = f"{candidate.maker} {kernel_s * 1e3:.3f} ms, {candidate.beside} {reference_s * 1e3:.3f} ms"
    if _wins(kernel_s, reference_s):
        return Verdict(kernel_s, f"{candidate.maker} ({times})")
    return Verdict(inf, f"{candidate.beside} ({times})")


def choose(all_kernels: Kernels, candidates: Iterable[Candidate], time_s: Timer) -> Choice:
    """Return the kernels that beat torch, each in its fastest form. Candidates are made one by one."""
    chosen, forms, has_failed = all_kernels, Forms(), False
    fastest_s, reasons = dict[str, float](), list[str]()
    for candidate in candidates:
        name = candidate.name
        verdict = judge(candidate, time_s)
        reasons.append(f"{name}{candidate.form} {verdict.reason}")
        has_failed |= verdict.has_failed
        if name not in fastest_s:
            fastest_s[name], forms[name] = inf, None
            chosen = replace(chosen, **{name: getattr(TORCH, name)})
        if _wins(verdict.seconds, fastest_s[name]):
            fastest_s[name], forms[name] = verdict.seconds, candidate.form
            chosen = replace(chosen, **{name: candidate.implementation or getattr(all_kernels, name)})
    return Choice(chosen, ", ".join(reasons), None if has_failed else forms)


def _wins(challenger_s: float, champion_s: float) -> bool:
    return challenger_s < champion_s * (1 - MARGIN)


def _one_line(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:120]}"
