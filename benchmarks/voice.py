"""What `chunking_strategy=auto` costs over HTTP: the same files with and without it, in turns.

    python -m benchmarks.voice                       whisper-base on recordings of people, 16 in flight
    python -m benchmarks.voice --shape tiny          random weights of whisper-tiny's shape, 60 tokens a chunk
    python -m benchmarks.voice --quick               few files and rounds, to see that it works

Distinct recordings (with --shape made of spoken digits, 2 to 30 s, in WAV): loudness is evened and Silero's
detector runs over every second of them. Which of the two goes first changes from round to round, so that what
else the machine does cancels out; the processor time of all the server's processes changes least with that.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Final

import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from benchmarks.client import Client, connected, transcribe
from benchmarks.real_weights import hugging_face_checkpoint
from benchmarks.reporting import Seconds, benchmark_parser, command, machine, percent_more, spread, write_json
from benchmarks.running_server import running_server
from benchmarks.uploads import Upload, recordings_of_people, short_uploads

WAYS: Final[dict[str, dict[str, str]]] = {"default": {}, "auto": {"chunking_strategy": "auto"}}


Rounds = dict[str, list[Seconds]]  # by way; processor time is that of the server's processes


async def measure(url: str, uploads: Sequence[Upload], options: argparse.Namespace) -> Rounds:
    common = {"language": "en", "max_completion_tokens": str(options.tokens)} if options.shape else {}
    costs: Rounds = {way: [] for way in WAYS}
    async with connected(url) as client:
        with Progress(console=Console(stderr=True)) as progress:
            for number in progress.track(range(options.rounds + 1), description="rounds"):
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    cost = await _round(client, uploads, options.in_flight, common | WAYS[way])
                    if number:  # the first one warms up
                        costs[way].append(cost)
    return costs


async def _round(
    client: Client, uploads: Sequence[Upload], in_flight: int, fields: Mapping[str, str]
) -> Seconds:
    places = asyncio.Semaphore(in_flight)

    async def one(upload: Upload) -> None:
        async with places:
            language = {"language": upload.clip.language} if upload.clip else {}
            await transcribe(client, upload.name, upload.data, {**fields, **language})

    started, cpu_started = time.perf_counter(), _server_cpu_s()
    await asyncio.gather(*map(one, uploads))
    return Seconds(time.perf_counter() - started, _server_cpu_s() - cpu_started)


def _server_cpu_s() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    total: float = sum(each.user + each.system for each in times)
    return total


def show(costs: Rounds, audio_s: float, console: Console) -> dict[str, list[float]]:
    for way, rounds in costs.items():
        walls = [cost.wall for cost in rounds]
        console.print(
            f"{way}: {spread(walls)} s, {audio_s / statistics.median(walls):.0f} times real time, "
            f"{spread([cost.cpu for cost in rounds])} s of processor time"
        )
    more = percent_more(list(zip(costs["default"], costs["auto"], strict=True)))
    console.print(f"auto costs {spread(more['wall'], 1)} % more time, {spread(more['cpu'], 1)} % more CPU")
    return more


def main() -> None:
    options = arguments()
    console = Console(stderr=True, width=140)
    console.print(command(), machine())
    flags = ["--dtype", options.dtype]
    if not options.shape:
        model = str(hugging_face_checkpoint(options.model))
        uploads = recordings_of_people(options.requests)
    else:
        uploads = short_uploads(options.requests, ["wav"])
        model = str(fixed_checkpoint(options.shape, options.checkpoints, "cpu"))
        flags += ["--no-check-voice"]  # what random weights say is always in doubt
    with running_server(model, *flags) as url:
        costs = asyncio.run(measure(url, uploads, options))
    more = show(costs, sum(upload.duration_s for upload in uploads), console)
    write_json(options.json, {"rounds": costs, "cost_percent": more})


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights instead of a checkpoint")
    parser.add_argument("--tokens", type=int, default=60, help="a chunk, with --shape")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64, help="files in a round")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    add_checkpoints_option(parser)
    parser.add_argument("--quick", action="store_true", help="16 files, 3 rounds")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.rounds = 16, 3
    return options


if __name__ == "__main__":
    main()
