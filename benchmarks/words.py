"""What it costs to ask for word times: the engine with and without, in turns.

    python -m benchmarks.words                    whisper-tiny's shape, 16 clips of 30 s in flight
    python -m benchmarks.words --shape small --tokens 120 --json words.json
    python -m benchmarks.words --quick            few rounds, to see that it works

Random weights of the shape asked for with the published model's alignment heads, end-of-text suppressed, a
fixed number of tokens a clip, all of them text. Every clip is distinct, and made before the clock starts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track

from asr_server.channel.messages import Result, Submit
from asr_server.core import ChunkId, DecodingOptions, Samples
from asr_server.engine import Engine, EngineConfig
from asr_server.engine.config import choose_device
from benchmarks.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from benchmarks.clips import make_clip
from benchmarks.reporting import Seconds, benchmark_parser, command, machine, percent_more, spread, write_json


def seconds_for(engine: Engine, clips: Sequence[Samples], tokens: int, with_words: bool) -> Seconds:
    """Until the last result, all clips being submitted at once."""
    options = DecodingOptions(language="en", max_new_tokens=tokens, word_timestamps=with_words)
    started, cpu_started, num_results = time.perf_counter(), time.process_time(), 0
    for i, clip in enumerate(clips):
        engine.handle(Submit(ChunkId(str(i), 0), clip, options))
    while engine.has_work:
        results = [event.result for event in engine.step() if isinstance(event, Result)]
        assert all(bool(result.token_times_s) == with_words for result in results)
        num_results += len(results)
    assert num_results == len(clips)
    return Seconds(time.perf_counter() - started, time.process_time() - cpu_started)


def measure(options: argparse.Namespace, console: Console) -> list[tuple[Seconds, Seconds]]:
    """Without and with words, for each round."""
    directory = fixed_checkpoint(options.shape, options.checkpoints, choose_device(options.device).type)
    engine = Engine.load(
        EngineConfig(str(directory), options.device, options.dtype, cpu_threads=options.threads)
    )
    clips = [make_clip(i, options.clip_s) for i in range(options.in_flight)]

    def both() -> tuple[Seconds, Seconds]:
        return (
            seconds_for(engine, clips, options.tokens, with_words=False),
            seconds_for(engine, clips, options.tokens, with_words=True),
        )

    try:
        both()  # warm up
        return [both() for _ in track(range(options.rounds), "rounds", console=console)]
    finally:
        engine.close()


def main() -> None:
    options = arguments()
    console = Console(stderr=True, width=140)
    console.print(command(), machine())
    rounds = measure(options, console)
    audio_s = options.in_flight * options.clip_s
    for name, column in (("without", 0), ("with", 1)):
        walls = [both[column].wall for both in rounds]
        console.print(
            f"{name} words: {spread(walls)} s, {audio_s / statistics.median(walls):.0f} times real time"
        )
    costs = percent_more(rounds)
    console.print(
        f"word times cost {spread(costs['wall'], 1)} % more time, {spread(costs['cpu'], 1)} % more CPU"
    )
    write_json(options.json, {"rounds": rounds, "cost_percent": costs})


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--clip-s", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--rounds", type=int, default=5)
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="few rounds and clips, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.in_flight, options.tokens = 2, 4, 20
    return options


if __name__ == "__main__":
    main()
