"""Speed on real speech, with the error rate beside it: ours and its peers on the same recordings, in turns.

    python -m benchmarks.peers               whisper-base, 40 recordings of several corpora, three rounds
    python -m benchmarks.peers --rounds 5 --systems ours "faster-whisper int8"
    python -m benchmarks.peers --at-once 1             one request at a time
    python -m benchmarks.peers --longest-s 10          short recordings alone
    python -m benchmarks.peers --model tiny.en --recordings 80 --languages en
    python -m benchmarks.peers --reading-s 800         one long file: a voice that reads sentences
    python -m benchmarks.peers --sparse 3              one file, a sixth speech, else music and silence
    python -m benchmarks.peers --quick       eight recordings, one round, two peers

Every system has a process of its own with all cores, has loaded its model and has heard two recordings before
the clock starts. In each round each system hears all recordings once: seconds from the first one to the last
text, the length of the recordings over that (RTFx), the errors in what it heard, and the most memory that
its processes had at once (proportional set size: shared pages count once). Only one works at a time; the
others wait, so that the ratio of two systems in one round says more than their seconds where the machine has
other work. With `--at-once 1` there is one recording's latency, too, the median of all. Ours is the whole
server and gets files over HTTP, 16 at once unless told otherwise; the peers are libraries and get samples.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.reporting import Budget, benchmark_parser, command, machine, spread, write_json
from benchmarks.transcribers import REQUESTS_AT_ONCE, SYSTEMS, Heard, Task, package_of
from harness.real_weights import hugging_face_checkpoint
from harness.speech import Clip, word_errors
from harness.speech.corpora import CACHE, chosen_clips, kept
from harness.speech.error_rates import Score, total
from harness.speech.scenes import fetch, scenes
from harness.speech.synthesis import readings

NUM_WARM_UP = 2
QUICK = ("ours", "faster-whisper int8", "openai-whisper greedy")
MIB = 1 << 20
SPARSE_SEED = 2


@dataclass(frozen=True)
class Round:
    seconds: float
    memory_mib: float
    texts: dict[str, str]  # by the clip's name
    latencies_s: list[float]  # between two texts: a recording's own where one is sent at a time

    def score(self, clips: Sequence[Clip]) -> Score:
        return total(word_errors(clip.text or "", self.texts[clip.name], clip.language) for clip in clips)


# -- One system, in a process of its own --------------------------------------------------------------------


class Runner:
    """Starts a process for one system, which hears all recordings whenever it is told to."""

    def __init__(self, system: str, checkpoint: Path, clips: Sequence[Clip], at_once: int) -> None:
        self.system = system
        listed = [vars(clip) | {"path": str(clip.path)} for clip in clips]
        arguments = json.dumps([system, str(checkpoint), listed, at_once])
        environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", "--worker", arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_until_ready(self) -> None:
        """Waits until it has loaded its model. Raises RuntimeError when the process has ended."""
        self._read('{"ready"')

    def run(self) -> Round:
        """Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        return Round(**json.loads(self._read('{"seconds"')))

    def _read(self, beginning: str) -> str:
        """The next line that begins so; libraries print there, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise RuntimeError(f"{self.system} ended with status {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def work(system: str, checkpoint: str, listed: Sequence[dict[str, Any]], at_once: int) -> None:
    """What the process does: for every line on standard input, one round; its figures as a line of JSON."""
    clips = [Clip(**fields | {"path": Path(fields["path"])}) for fields in listed]
    with SYSTEMS[system](Task(Path(checkpoint), at_once=at_once)) as transcribe:
        transcribe(clips[:NUM_WARM_UP], lambda clip, heard: None)
        print(json.dumps({"ready": system}), flush=True)
        for _ in sys.stdin:
            texts: dict[str, str] = {}
            done_at: list[float] = []

            def report(
                clip: Clip, heard: Heard, texts: dict[str, str] = texts, done_at: list[float] = done_at
            ) -> None:
                texts[clip.name] = heard.text
                done_at.append(time.perf_counter())

            with _PeakMemory() as memory:
                done_at.append(time.perf_counter())
                transcribe(clips, report)
                seconds = time.perf_counter() - done_at[0]
            latencies_s = [end - start for start, end in pairwise(done_at)]
            print(json.dumps(vars(Round(seconds, memory.peak / MIB, texts, latencies_s))), flush=True)


class _PeakMemory(threading.Thread):
    """Watches what this process and its children have together, twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self._look()

    def _look(self) -> None:
        own, now = psutil.Process(), 0
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.Error):
                now += process.memory_full_info().pss
        self.peak = max(self.peak, now)

    def __enter__(self) -> _PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        self._look()


# -- All of them in turns -----------------------------------------------------------------------------------


Rounds = dict[str, list[Round]]


def take_turns(
    systems: Sequence[str], clips: Sequence[Clip], options: argparse.Namespace, console: Console
) -> Rounds:
    """Who comes first changes from round to round. What there is, is written after each."""
    checkpoint, budget = hugging_face_checkpoint(options.model), Budget(options.budget_s, console)
    rounds: Rounds = {system: [] for system in systems}
    runners = [Runner(system, checkpoint, clips, options.at_once) for system in systems]
    try:
        for runner in runners:
            runner.wait_until_ready()  # else the first would be timed while the last still loads
        with Progress(console=console) as progress:
            bar = progress.add_task("rounds", total=options.rounds * len(runners))
            for number in range(options.rounds):
                if number and not budget.allows(f"round {number + 1}", _round_s(rounds)):
                    break
                first = number % len(runners)
                for runner in (*runners[first:], *runners[:first]):
                    progress.update(bar, description=runner.system)
                    rounds[runner.system].append(runner.run())
                    progress.advance(bar)
                write_json(options.json, figures(rounds, clips))
    finally:
        for runner in runners:
            runner.close()
    return rounds


def _round_s(rounds: Rounds) -> float:
    return sum(each[-1].seconds for each in rounds.values())


def audio_s(clips: Sequence[Clip]) -> float:
    return sum(clip.duration_s for clip in clips)


def ratios(rounds: Rounds, system: str) -> list[float]:
    """Its seconds over those of ours in the same round."""
    return [
        theirs.seconds / ours.seconds for theirs, ours in zip(rounds[system], rounds["ours"], strict=False)
    ]


def latency_s(own: Sequence[Round]) -> float:
    """Median over recordings and rounds."""
    return statistics.median(latency for each in own for latency in each.latencies_s)


def show(rounds: Rounds, clips: Sequence[Clip], one_at_a_time: bool, console: Console) -> None:
    table = Table("system", "s, median (range)", "RTFx", "its time / ours", "errors", "memory, MiB")
    if one_at_a_time:
        table.add_column("one, s")
    for system, own in rounds.items():
        seconds = [each.seconds for each in own]
        latency = (f"{latency_s(own):.3f}",) if one_at_a_time else ()
        table.add_row(
            system,
            spread(seconds, 1),
            f"{audio_s(clips) / statistics.median(seconds):.1f}",
            spread(ratios(rounds, system)) if "ours" in rounds else "",
            f"{own[-1].score(clips).error_rate:.1%}",
            f"{max(each.memory_mib for each in own):.0f}",
            *latency,
        )
    languages = ", ".join(sorted({clip.language for clip in clips}))
    console.print(f"{len(clips)} recordings, {audio_s(clips):.0f} s, {languages}")
    console.print(table)


def figures(rounds: Rounds, clips: Sequence[Clip]) -> dict[str, Any]:
    return {
        "recordings": [clip.name for clip in clips],
        "audio_s": audio_s(clips),
        "systems": {
            system: {
                "seconds": [each.seconds for each in own],
                "memory_mib": [each.memory_mib for each in own],
                "latencies_s": [each.latencies_s for each in own],
                "errors": [vars(each.score(clips)) for each in own],
                "texts": own[-1].texts,
            }
            for system, own in rounds.items()
            if own
        },
    }


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--recordings", type=int, default=40)
    parser.add_argument("--languages", nargs="+", help="those of the recordings in these, as en")
    parser.add_argument(
        "--longest-s", type=float, default=inf, help="those of the recordings up to this length"
    )
    parser.add_argument("--reading-s", type=float, help="one reading of so many seconds instead")
    parser.add_argument("--sparse", type=int, help="one recording of so many scenes of each kind instead")
    parser.add_argument("--at-once", type=int, default=REQUESTS_AT_ONCE, help="requests to ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="[default: all that are installed]")
    parser.add_argument("--quick", action="store_true", help="eight recordings, one round, two peers")
    options = parser.parse_args()
    if options.quick:
        options.recordings, options.rounds = 8, 1
        options.systems = options.systems or list(QUICK)
    return options


def recordings(options: argparse.Namespace) -> list[Clip]:
    if options.sparse:
        return [sparse(options.sparse)]
    return readings(1, options.reading_s) if options.reading_s else chosen_clips(options.recordings)


def sparse(number: int) -> Clip:
    """Return one recording of scenes with sentences between music and effects, every second one silenced."""
    fetch()
    parts, texts = list[Samples](), list[str]()
    for kind, speech in scenes(number, SPARSE_SEED):
        if kind.startswith("between"):
            for said in speech.sentences[1::2]:
                speech.samples[round(said.start_s * SAMPLE_RATE) : round(said.end_s * SAMPLE_RATE)] = 0
            parts.append(speech.samples)
            texts += [said.text for said in speech.sentences[::2]]
    path = kept(CACHE / f"sparse/{SPARSE_SEED}-{number}.flac", lambda: np.concatenate(parts))
    return Clip(path.stem, "sparse", path, " ".join(texts), "en", "GPL")


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(*json.loads(sys.argv[2]))
        return
    options = parse()
    console = Console(stderr=True, width=120)
    console.print(command(), machine())
    clips = [
        clip
        for clip in recordings(options)
        if clip.duration_s <= options.longest_s and clip.language in (options.languages or [clip.language])
    ]
    if not clips:
        raise SystemExit("no recordings are installed: harness/speech/install.sh fetches what can be had")
    systems = options.systems or list(SYSTEMS)
    systems = [name for name in systems if name.startswith("ours") or find_spec(package_of(name))]
    rounds = take_turns(systems, clips, options, console)
    show(rounds, clips, options.at_once == 1, console)


if __name__ == "__main__":
    main()
