"""Word error rate of a model over a manifest, by Whisper's normaliser, through a server and beside others.

    python -m benchmarks.accuracy MANIFEST --model turbo --systems http,openai_whisper,transformers
    python -m benchmarks.accuracy MANIFEST --url http://gpu-host:8000      a server that runs
    python -m benchmarks.accuracy --json accuracy.json --plot accuracy.png  digits, with the embedded model
    python -m benchmarks.accuracy --quick                                   a few of them

A manifest has JSON lines: `audio` (a path from its folder), `text`, and if known `language` (`en`) and
`times` (`[[start, end], ...]` in seconds, for each word of the text). Files may be long. Without one, digits
of synthesised voices are said, short sequences and a long one, with times. Substitutions, insertions and
deletions are told apart; a word's time error is the larger of those of its two ends, over words heard right.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.checkpoint import resolve_checkpoint
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE
from benchmarks.reporting import benchmark_parser, command, machine, pyplot, quantile, write_json
from benchmarks.scoring import NORMALISERS, Score, TimedWord, time_errors_s, word_errors
from benchmarks.transcribers import SYSTEMS, Heard, Spoken, Task
from tests.speech import VOICES, say

NEAR_S = 0.1
PEERS = {"openai_whisper": "whisper", "transformers": "transformers", "faster_whisper": "faster_whisper"}


def read_manifest(path: Path) -> list[Spoken]:
    """Raises SystemExit for a line that cannot be used."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [_spoken(json.loads(line), path, number) for number, line in enumerate(lines, start=1)]


def _spoken(entry: dict[str, Any], manifest: Path, number: int) -> Spoken:
    spoken = Spoken(
        manifest.parent / entry["audio"],
        entry["text"],
        entry.get("language", "en"),
        tuple((start, end) for start, end in entry.get("times") or ()),
    )
    if spoken.times and len(spoken.times) != len(spoken.text.split()):
        raise SystemExit(f"{manifest}:{number}: there must be as many times as words in the text")
    return spoken


def say_digits(folder: Path, num_short: int, long_s: float) -> Path:
    """Writes recordings of digits and their manifest."""
    rng = np.random.default_rng(11)
    lines = []
    for index in range(num_short + 1):
        num_digits = int(rng.integers(3, 13)) if index < num_short else round(long_s)
        digits = "".join(rng.choice(list("0123456789"), num_digits))
        spoken = say(digits, VOICES[index % len(VOICES)], gap_s=rng.uniform(0.1, 1.0, num_digits).tolist())
        soundfile.write(folder / f"{index}.flac", spoken.samples, SAMPLE_RATE)
        lines.append(json.dumps({"audio": f"{index}.flac", "text": spoken.text, "times": spoken.times}))
    manifest = folder / "manifest.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def score(spoken: Spoken, heard: Heard, normaliser: str) -> Score:
    result = word_errors(spoken.text, heard.text, NORMALISERS[normaliser])
    words = spoken.text.split()
    truth = [TimedWord(word, *times) for word, times in zip(words, spoken.times, strict=False)]
    result.time_errors_s = time_errors_s(truth, heard.words)
    return result


def measure(
    names: list[str], task: Task, files: list[Spoken], normaliser: str
) -> Iterator[tuple[str, list[Score]]]:
    for name in names:
        with Progress(console=Console(stderr=True)) as progress, SYSTEMS[name](task) as transcribe:
            bar = progress.add_task(name, total=len(files))
            heard = transcribe(files, partial(progress.advance, bar))
        yield name, [score(spoken, each, normaliser) for spoken, each in zip(files, heard, strict=True)]


def total(scores: list[Score]) -> Score:
    return sum(scores, Score())


def show(results: dict[str, list[Score]]) -> None:
    table = Table("system", "files wrong", "words", "WER", "sub", "ins", "del")
    for title in ("times: median", "99 %", f"within {NEAR_S:g} s"):
        table.add_column(title)
    for name, scores in results.items():
        sum_ = total(scores)
        num_wrong = sum(each.error_rate > 0 for each in scores)
        counts = (sum_.substitutions, sum_.insertions, sum_.deletions)
        cells = [f"{num_wrong} of {len(scores)}", str(sum_.num_words), f"{sum_.error_rate:.2%}"]
        table.add_row(name, *cells, *map(str, counts), *_times(sum_.time_errors_s))
    Console().print(table)


def _times(errors_s: list[float]) -> list[str]:
    if not errors_s:
        return []
    near = float(np.mean(np.array(errors_s) <= NEAR_S))
    return [f"{quantile(errors_s, 0.5):.3f} s", f"{quantile(errors_s, 0.99):.3f} s", f"{near:.1%}"]


def plot(results: dict[str, list[Score]], path: Path) -> None:
    """The three kinds of errors, stacked, for each system."""
    figure, axes = pyplot().subplots(figsize=(7, 1.5 + 0.4 * len(results)), layout="constrained")
    left = np.zeros(len(results))
    for kind in ("substitutions", "insertions", "deletions"):
        sums = [total(scores) for scores in results.values()]
        shares = np.array([100 * getattr(sum_, kind) / max(1, sum_.num_words) for sum_ in sums])
        axes.barh(list(results), shares, left=left, label=kind)
        left += shares
    axes.set_xlabel("word errors (%)")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=150)


def figures(files: list[Spoken], results: dict[str, list[Score]]) -> dict[str, Any]:
    return {
        name: {
            "total": vars(total(scores)) | {"error_rate": total(scores).error_rate},
            "files": {str(f.audio): vars(each) for f, each in zip(files, scores, strict=True)},
        }
        for name, scores in results.items()
    }


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, plots=True)
    parser.add_argument("manifest", nargs="?", type=Path)
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--url", default="", help="of a server; else one is started for `http`")
    parser.add_argument("--systems", help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--normaliser", choices=NORMALISERS, help="[default: english; basic for digits]")
    parser.add_argument("--no-times", action="store_true", help="ask for no word times")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    Console().print(command(), machine())
    available = [name for name in SYSTEMS if name not in PEERS or find_spec(PEERS[name])]
    names = options.systems.split(",") if options.systems else ["http"] if options.url else available
    with tempfile.TemporaryDirectory() as folder:
        short, long_s = (3, 15.0) if options.quick else (100, 600.0)
        files = read_manifest(options.manifest or say_digits(Path(folder), short, long_s))
        with_times = not options.no_times and any(spoken.times for spoken in files)
        model = options.model if options.url else str(resolve_checkpoint(options.model))
        task = Task(model, options.url, with_times)
        normaliser = options.normaliser or ("english" if options.manifest else "basic")
        results = dict(measure(names, task, files, normaliser))
    show(results)
    write_json(options.json, figures(files, results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
