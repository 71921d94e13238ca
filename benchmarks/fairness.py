"""How long a short request waits behind a long one.

    python -m benchmarks.fairness        whisper-tiny's shape, a 5 s clip behind 4 and behind 40 chunks

A long file's chunks of 30 s are with the dispatcher when a clip of 5 s arrives. Measured is the time from
its arrival to the end of its encode: the clip asks for its language, which the replica reports right then.
Its own encode, measured on an idle replica, is taken off. Rounds are interleaved; the weights are random.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Chunk, DecodingOptions
from asr_server.dispatch.dispatcher import Dispatcher
from asr_server.dispatch.queue import RequestHandle
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.reporting import benchmark_parser, command, machine, pyplot, spread, write_json

CACHE = Path(__file__).parents[1] / ".cache" / "checkpoints"
TOKENS_PER_CHUNK = 60
LONG = DecodingOptions(language="en", max_new_tokens=TOKENS_PER_CHUNK)
CLIP = DecodingOptions(max_new_tokens=10)


def chunk(index: int, duration_s: float, rng: np.random.Generator) -> Chunk:
    samples = rng.normal(0, 0.1, int(duration_s * SAMPLE_RATE)).astype(np.float32)
    return Chunk(index, 0, samples)


class Scene:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._rng = np.random.default_rng(3)
        self._count = 0

    async def wait_behind(self, num_chunks: int, delay_s: float) -> float:
        """Seconds from the clip's arrival to the end of its encode, `delay_s` after the long file's."""
        long = self._open()
        file = [chunk(index, 30.0, self._rng) for index in range(num_chunks)]
        sent = [asyncio.create_task(long.submit(piece, LONG)) for piece in file]
        await asyncio.sleep(delay_s)
        try:
            return await self._encode_clip()
        finally:
            long.cancel()
            await asyncio.gather(*sent, return_exceptions=True)
            await self._idle()

    async def _encode_clip(self) -> float:
        encoded_at = 0.0

        def note(probabilities: dict[str, float]) -> str:
            nonlocal encoded_at
            encoded_at = time.perf_counter()
            return "en"

        clip = chunk(0, 5.0, self._rng)
        arrived_at = time.perf_counter()
        await self._open().submit(clip, CLIP, on_language=note)
        return encoded_at - arrived_at

    def _open(self) -> RequestHandle:
        self._count += 1
        return self._dispatcher.open(f"request {self._count}")

    async def _idle(self) -> None:
        """Until the replica has let go of what was cancelled: its next chunk is answered at once then."""
        await self._encode_clip()


async def measure(
    settings: Settings, behind: list[int], delay_s: float, repeats: int
) -> dict[int, list[float]]:
    dispatcher = Dispatcher(settings)
    await dispatcher.start()
    while not dispatcher.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    scene, waits_s = Scene(dispatcher), {count: list[float]() for count in (0, *behind)}
    for _ in track(range(repeats), description="rounds", console=Console(stderr=True)):
        for count in waits_s:
            waits_s[count].append(await scene.wait_behind(count, delay_s))
    await dispatcher.stop()
    own_s = statistics.median(waits_s.pop(0))
    return {count: [wait_s - own_s for wait_s in own] for count, own in waits_s.items()}


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True)
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--behind", type=int, nargs=2, default=[4, 40])
    parser.add_argument("--delay-s", type=float, default=0.02, help="from the long file to the clip")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 repeats")
    options = parser.parse_args()
    model = make_checkpoint(CACHE / options.shape, SHAPES[options.shape])
    settings = Settings(model=str(model), chunks_ahead=max(options.behind))
    waits_s = asyncio.run(
        measure(settings, options.behind, options.delay_s, 3 if options.quick else options.repeats)
    )
    console = Console()
    console.print(command(), machine())
    table = Table("behind chunks", "wait in s, median (least to most)")
    for count, own in waits_s.items():
        table.add_row(str(count), spread(own, 3))
    console.print(table)
    few, many = (statistics.median(waits_s[count]) for count in options.behind)
    console.print(f"ratio of the medians: {many / few:.2f}")
    write_json(options.json, {"waits_s": waits_s, "ratio": many / few})
    if options.plot:
        plot(waits_s, options.plot)


def plot(waits_s: dict[int, list[float]], path: Path) -> None:
    """Every wait, side by side."""
    figure, axes = pyplot().subplots(figsize=(5, 4), layout="constrained")
    axes.boxplot(list(waits_s.values()), tick_labels=[str(count) for count in waits_s])
    axes.set(xlabel="chunks of 30 s before the clip", ylabel="seconds until its encode", ylim=(0, None))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
