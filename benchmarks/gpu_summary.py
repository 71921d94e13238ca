"""The figures of `benchmarks/gpu.sh` in a few lines each: python -m benchmarks.gpu_summary DIRECTORY"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.reporting import quantile, spread


def parity(findings: list[dict[str, Any]]) -> Iterator[str]:
    for finding in findings:
        yield f"{'holds' if finding['holds'] else 'FAILS'}: {finding['what']}: {finding['found']}"


def engine(figures: dict[str, Any]) -> Iterator[str]:
    for case in figures["cases"]:
        setup, shares = case["setup"], case["gpu_busy"]
        busy = f", GPU busy {statistics.mean(shares):.0%}" if shares else ""
        times = ", word times" * case["word_times"]
        yield (
            f"{setup['shape']} beam {setup['beam_size']}, {case['in_flight']} x {case['clip_s']:g} s, "
            f"{case['tokens']} tokens{times}, encode batch {setup['encode_batch'] or 'auto'}, "
            f"{setup['compute_workers']} workers{', copy overlap' * setup['copy_overlap']}, "
            f"{setup['kernels']} kernels: "
            f"RTFx {spread(case['rtfx'], 0)}{busy}"
        )
    yield from dict.fromkeys(case["kernels"] for case in figures["cases"] if case["kernels"])


def _busy(rounds: list[dict[str, Any]]) -> str:
    shares = [each["gpu_busy"] for each in rounds if each["gpu_busy"] is not None]
    return f", GPU busy {statistics.mean(shares):.0%}" if shares else ""


def serving(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{figures['model']}, {figures['tokens_per_chunk']} tokens a chunk, flags {figures['flags']}"
    for case in figures["cases"]:
        rounds = case["rounds"]
        first_s, health_s = (
            [value for each in rounds for value in each[name]] for name in ("first_text_s", "health_s")
        )
        health = [f"{1e3 * quantile(health_s, share):.1f}" for share in (0.5, 0.99, 1.0) if health_s]
        yield (
            f"{case['concurrency']} at once, {case['length']} {case['formats']}, "
            f"{case['preprocess_workers']} threads: RTFx {spread([each['rtfx'] for each in rounds], 0)}, "
            f"{statistics.median(each['requests_per_s'] for each in rounds):.0f} requests/s{_busy(rounds)}, "
            f"first text {quantile(first_s, 0.5):.2f} s, /health {'/'.join(health)} ms, "
            f"client busy {max(each['client_busy'] for each in rounds):.0%}, "
            f"event loop {spread([each['event_loop_ms'] for each in rounds])} ms a request"
        )


def junit(path: Path) -> Iterator[str]:
    """How many passed, and what went wrong with the others."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    yield ", ".join(f"{count} {name}" for name, count in counts.items()) + f" in {suite.get('time')} s"
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            for problem in case.iterfind(kind):
                lines = problem.get("message", "").splitlines() or [""]
                yield f"{kind}: {case.get('name')}: {lines[0][:200]}"


SUMMARIES: dict[str, Callable[[Any], Iterator[str]]] = {
    "parity": parity,
    "real": parity,
    **dict.fromkeys(("turbo", "turbo-beam", "large", "workers", "graphs-off"), engine),
    **dict.fromkeys(("kernels", "batches", "lengths", "word-times"), engine),
    **dict.fromkeys(("http-clips", "http-long", "http-long-beam", "http-threads", "http-loads"), serving),
    **{f"replicas-{count}{mps}": serving for count in (1, 2, 3) for mps in ("", "-mps")},
}


def main() -> None:
    directory = Path(sys.argv[1])
    print(f"== figures of {device()}")
    for path in sorted(directory.glob("*.xml")):
        show(path.stem, partial(junit, path))
    for name, summary in SUMMARIES.items():
        path = directory / f"{name}.json"
        if path.exists():
            show(name, partial(_of_json, summary, path))


def device() -> str:
    """Return what the figures below are of."""
    if not torch.cuda.is_available():
        return f"CPU, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}; random weights but for `real`"


def show(name: str, lines: Callable[[], Iterator[str]]) -> None:
    """One that cannot be read, or holds what is not expected, keeps the others from nothing."""
    print(f"-- {name}")
    try:
        for line in lines():
            print(line)
    except Exception as error:
        print(f"cannot be summarised: {type(error).__name__}: {error}")


def _of_json(summary: Callable[[Any], Iterator[str]], path: Path) -> Iterator[str]:
    return summary(json.loads(path.read_text())["figures"])


if __name__ == "__main__":
    main()
