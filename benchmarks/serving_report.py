"""What `benchmarks.serving` measures, as a table and as JSON."""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.reporting import quantile, spread


@dataclass
class Round:
    """One pass over the files."""

    wall_s: float
    rtfx: float
    requests_per_s: float
    latencies_s: list[float]
    first_text_s: list[float]
    num_tokens: int
    health_s: list[float]
    gpu_busy: float | None
    client_busy: float  # processor seconds a second; near 1 the client is what is measured
    event_loop_ms: float  # of the server's processor, a request
    other_threads_ms: float
    decode_batch: float
    num_different: int  # answers that differ from the first ones to the same files
    error_rate: float | None  # None where the words are not known


@dataclass(eq=False)
class Case:
    preprocess_workers: int
    length: str  # of the files: seconds, mixed or long
    formats: str
    concurrency: int
    jobs_h: float = 0.0  # under way meanwhile
    rounds: list[Round] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.concurrency} at once, {self.label}"

    @property
    def files(self) -> tuple[str, str]:
        return self.length, self.formats

    @property
    def name(self) -> str:
        length = self.length if self.length.isalpha() else f"{self.length} s"
        beside = f", beside {self.jobs_h:g} h of jobs" if self.jobs_h else ""
        return f"{length} {self.formats}{beside}"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.preprocess_workers} preprocess workers"

    @property
    def rtfx(self) -> list[float]:
        return [each.rtfx for each in self.rounds]

    def all_of(self, name: str) -> list[float]:
        """Every value of a list that each round has."""
        return [value for each in self.rounds for value in getattr(each, name)]


def show(cases: Sequence[Case], console: Console) -> None:
    table = Table(
        "files", "threads", "at once", "RTFx, median (range)", "requests/s", "against the fewest",
        "latency p50 / p95, s", "first text, s", "/health p50 / p99 / max, ms", "decode batch",
        "GPU / client busy", "event loop / other threads, ms a request", "changed", "errors",
    )  # fmt: skip
    for case in cases:
        rounds, health_ms = case.rounds, [1e3 * seconds for seconds in case.all_of("health_s")]
        gpu = [each.gpu_busy for each in rounds if each.gpu_busy is not None]
        client = [each.client_busy for each in rounds]
        like = [other for other in cases if other.label == case.label]
        base = min(like, key=lambda other: other.concurrency)
        table.add_row(
            case.name,
            str(case.preprocess_workers),
            str(case.concurrency),
            spread(case.rtfx, 0),
            f"{statistics.median(each.requests_per_s for each in rounds):.1f}",
            f"{statistics.median(case.rtfx) / statistics.median(base.rtfx):.2f}",
            _quantiles(case.all_of("latencies_s"), (0.5, 0.95), 2),
            _quantiles(case.all_of("first_text_s"), (0.5, 0.95), 2),
            _quantiles(health_ms, (0.5, 0.99, 1.0), 1) if health_ms else "",
            f"{statistics.median(each.decode_batch for each in rounds):.1f}",
            " / ".join(f"{statistics.mean(shares):.0%}" for shares in (gpu, client) if shares),
            f"{statistics.median(each.event_loop_ms for each in rounds):.1f} / "
            f"{statistics.median(each.other_threads_ms for each in rounds):.1f}",
            str(sum(each.num_different for each in rounds)),
            *(f"{each.error_rate:.1%}" for each in rounds[-1:] if each.error_rate is not None),
        )
    console.print(table)


def _quantiles(values: Sequence[float], shares: Sequence[float], digits: int) -> str:
    return " / ".join(f"{quantile(values, share):.{digits}f}" for share in shares)


def figures(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.shape or options.model,
        "tokens_per_chunk": options.tokens if options.shape else None,
        "flags": options.started_with,
        "cases": [asdict(case) for case in cases],
    }
