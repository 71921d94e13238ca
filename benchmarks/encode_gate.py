"""How many chunks are encoded together under a closed loop of short clips, with the gate and without.

    python -m benchmarks.encode_gate        32 clients, each with a clip of 5 s at a time, 256 clips in all

The engine as it runs on a GPU, on the CPU: encodes run in a thread of their own, one batch after another,
while decoding goes on. With the gate at most two batches are under way, and what arrives meanwhile goes
together; without it every chunk is encoded as soon as it has a slot. Random weights, texts of different
lengths. The CPU gains nothing from a larger batch: what shows here is its size. Both ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from asr_server.core import ChunkId, DecodingOptions, Result, Samples, Submit
from asr_server.engine import Engine, EngineConfig, encoding, engine, runner
from benchmarks.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from benchmarks.clips import make_clip
from benchmarks.reporting import benchmark_parser, command, machine, spread, write_json

IN_FLIGHT: Final = {"with the gate": engine._ENCODES_IN_FLIGHT, "without": 1 << 30}


class RunningEncode:
    def __init__(self, encoding: Future[None]) -> None:
        self._encoding = encoding

    def is_done(self) -> bool:
        return self._encoding.done()

    def join(self) -> None:
        self._encoding.result()


class BackgroundEncoder:
    """The CPU's encoder in a thread of its own. `batches` lists the sizes of its batches."""

    def __init__(self, *parts: Any) -> None:
        self._encoder = encoding.CpuEncoder(*parts)
        self._thread = ThreadPoolExecutor(1)
        self.batches: list[int] = []

    def start(self, slots: Sequence[int], chunks: Sequence[Samples]) -> RunningEncode:
        self.batches.append(len(chunks))
        return RunningEncode(self._thread.submit(self._encode, slots, chunks))

    def _encode(self, slots: Sequence[int], chunks: Sequence[Samples]) -> None:
        self._encoder.start(slots, chunks)

    def close(self) -> None:
        self._thread.shutdown()
        self._encoder.close()


def closed_loop(model: Path, in_flight: int, options: argparse.Namespace) -> dict[str, float]:
    """Each client sends its next clip when it has the text of the last one."""
    engine._ENCODES_IN_FLIGHT = in_flight
    config = EngineConfig(
        str(model), "cpu", num_slots=options.clients, encode_batch=8, compute_workers=1, lookahead=True
    )
    loaded = Engine.load(config)
    clips = [make_clip(i, options.clip_s) for i in range(options.clients)]
    waiting, num_done, started = list(range(options.clips)), 0, time.perf_counter()

    def send(count: int) -> None:
        for _ in range(min(count, len(waiting))):
            number = waiting.pop(0)
            tokens = 1 + options.tokens // 2 + number * 7 % options.tokens  # texts differ in length
            asked = DecodingOptions(language="en", max_new_tokens=tokens)
            loaded.handle(Submit(ChunkId(str(number), 0), clips[number % len(clips)], asked))

    send(options.clients)
    while num_done < options.clips:
        finished = sum(isinstance(event, Result) for event in loaded.step())
        num_done += finished
        send(finished)
    seconds = time.perf_counter() - started
    encoder: Any = loaded._runner._encoder  # type: ignore[union-attr]
    loaded.close()
    steady = encoder.batches[options.clients // 8 :]  # all clients begin together, which fills the first ones
    return {"encode_batch_mean": statistics.mean(steady), "clips_per_s": options.clips / seconds}


def main() -> None:
    options = arguments()
    console = Console(width=120)
    console.print(command(), machine())
    model = fixed_checkpoint(options.shape, options.checkpoints, "cpu")
    runner.make_encoder = BackgroundEncoder  # type: ignore[assignment,attr-defined]
    figures: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, in_flight in IN_FLIGHT.items():
            for key, value in closed_loop(model, in_flight, options).items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
            write_json(options.json, figures)
    table = Table("", "mean encode batch", "clips a second")
    for name, own in figures.items():
        table.add_row(name, spread(own["encode_batch_mean"]), spread(own["clips_per_s"]))
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--clips", type=int, default=256)
    parser.add_argument("--clip-s", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=20, help="of a clip, in the mean")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round of 64 clips, a small shape")
    add_checkpoints_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.clips, options.shape = 1, 64, "pocket"
    return options


if __name__ == "__main__":
    main()
