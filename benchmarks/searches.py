"""The host's share of a decode step: greedy chunks, sure beam searches and searches in doubt.

    python -m benchmarks.searches               128 chunks, 100 tokens each
    python -m benchmarks.searches --chunks 1 128 256

No model: a stand-in for the device hands out tokens that were made before the clock starts. What is left is
the engine's own work, on its thread, for each step. The best of several rounds, in microseconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import ChunkId, DecodingOptions
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.beam import num_candidates, num_named
from asr_server.engine.loop import DecodeLoop
from asr_server.engine.slots import SlotTable
from benchmarks.reporting import benchmark_parser, command, machine

LEADS = {"sure": 12.0, "in doubt": 2.0}  # of the likeliest token, by its log-probability
BEAM_SIZE = 5


class InstantDevice:
    """Takes the runner's place: every step chooses text for every slot at once."""

    def __init__(self, num_slots: int, beam_size: int, lead: float) -> None:
        self.model = SimpleNamespace(sizes=SimpleNamespace(text_positions=448))
        count, random = num_candidates(beam_size), np.random.default_rng(0)
        self._count = count
        self._report = np.zeros((3 + 2 * (count + num_named(beam_size)), num_slots))
        self._report[0] = random.integers(0, 100, num_slots)
        self._report[1] = -0.05
        if count:
            self._report[3 : 3 + count] = self._report[0] + np.arange(count)[:, None]
            self._report[3 + count : 3 + 2 * count] = -0.05 - lead * np.arange(count)[:, None]

    def decode(self, plan: Any) -> Any:
        self._report[0, : plan.num_rows] += 1  # else a text would be taken for a loop
        self._report[3 : 3 + self._count] += 1
        return self

    def array(self) -> npt.NDArray[np.float64]:
        return self._report

    def start(self, starts: Any) -> None: ...

    def branch(self, sources: Any, starts: Any) -> None: ...


def step_us(num_chunks: int, beam_size: int, lead: float, num_steps: int, tokenizer: Tokenizer) -> float:
    slots = SlotTable(num_chunks, num_chunks, beam_size)
    device: Any = InstantDevice(num_chunks * beam_size, beam_size, lead)
    loop = DecodeLoop(device, tokenizer, slots, True, lambda *_: None)
    samples, options = np.zeros(480_000, np.float32), DecodingOptions(language="en")
    chunks = [ActiveChunk(ChunkId(str(i), 0), samples, options, "en") for i in range(num_chunks)]
    for chunk in chunks:
        chunk.beam_size = beam_size
        chunk.set_prompt(tokenizer.specials, 448)
        slots.place(chunk)
    loop.start(chunks)
    started = time.thread_time()
    for _ in range(num_steps):
        loop.step()
    return (time.thread_time() - started) / num_steps * 1e6


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--chunks", nargs="+", type=int, default=[128])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    console = Console(width=110)
    console.print(command(), machine())
    tokenizer = Tokenizer.from_directory(Path(EMBEDDED_MODEL))
    table = Table("chunks", "greedy, us a step", *(f"{name} ({BEAM_SIZE}), us a step" for name in LEADS))
    for count in options.chunks:
        ways = [(1, 0.0), *((BEAM_SIZE, lead) for lead in LEADS.values())]
        rounds = [
            [step_us(count, *way, options.tokens, tokenizer) for way in ways] for _ in range(options.rounds)
        ]
        table.add_row(str(count), *(f"{min(times):.0f}" for times in zip(*rounds, strict=True)))
    console.print(table)


if __name__ == "__main__":
    main()
