"""The whole server over HTTP: many requests at once against one after another, and /health meanwhile.

    python -m benchmarks.serving        the embedded model, distinct clips of 2 to 30 s in six formats
    python -m benchmarks.serving --model DIR --requests 64 --concurrency 1 8 32

Throughput is seconds of audio over (last response - first request); making the clips is not counted.
Rounds of the concurrencies are interleaved. Every answer is compared with the answer to the same clip alone.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import av
import httpx
import numpy as np
import soundfile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.running_server import running_server
from tests.speech import VOICES, say

HEALTH_EVERY_S = 0.05
CODECS = {"mp3": ("mp3", "mp3"), "m4a": ("mp4", "aac"), "webm": ("webm", "libopus")}  # container, codec
FORMATS = ("wav", "flac", "mp3", "ogg", "m4a", "webm")


@dataclass(frozen=True)
class Clip:
    name: str
    data: bytes
    duration_s: float


def make_clips(count: int) -> list[Clip]:
    """Distinct sequences of spoken digits, 2 to 30 s, formats in turn."""
    rng = np.random.default_rng(5)
    clips = []
    for index in range(count):
        digits = "".join(rng.choice(list("0123456789"), rng.integers(3, 36)))
        samples = say(digits, VOICES[index % len(VOICES)], gap_s=0.25).samples[: 30 * SAMPLE_RATE]
        suffix = FORMATS[index % len(FORMATS)]
        clips.append(Clip(f"{index}.{suffix}", encode(samples, suffix), len(samples) / SAMPLE_RATE))
    return clips


def encode(samples: Samples, suffix: str) -> bytes:
    """The samples in a container that `suffix` names."""
    file = io.BytesIO()
    if suffix in ("wav", "flac", "ogg"):
        soundfile.write(file, samples, SAMPLE_RATE, format=suffix.upper())
        return file.getvalue()
    container, codec = CODECS[suffix]
    pcm = (np.clip(samples, -1, 1) * 32767).astype(np.int16)
    frame = av.AudioFrame.from_ndarray(pcm[None, :], format="s16", layout="mono")
    frame.sample_rate = SAMPLE_RATE
    with av.open(file, "w", format=container) as output:
        stream = cast(av.AudioStream, output.add_stream(codec, rate=48_000))
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, "mono", 48_000, context.frame_size)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()


@dataclass
class Round:
    """One pass over all clips at one concurrency."""

    concurrency: int
    rtfx: float
    requests_per_s: float
    latencies_s: list[float]
    health_s: list[float] = field(default_factory=list)
    decode_batch: float = 0.0
    num_different: int = 0  # answers that differ from those of the first round


class Load:
    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self._client = client
        self._answers: dict[str, str] = {}

    async def round(self, clips: list[Clip], concurrency: int) -> Round:
        places, health = asyncio.Semaphore(concurrency), _Health(self._client, self._url)
        before = await self._replica()
        probe = asyncio.create_task(health.run())
        start = time.perf_counter()
        outcomes = await asyncio.gather(*(self._send(clip, places) for clip in clips))
        wall_s = time.perf_counter() - start
        probe.cancel()
        after = await self._replica()
        return Round(
            concurrency,
            rtfx=sum(clip.duration_s for clip in clips) / wall_s,
            requests_per_s=len(clips) / wall_s,
            latencies_s=[latency_s for latency_s, _ in outcomes],
            health_s=health.latencies_s,
            decode_batch=_batch_between(before, after),
            num_different=sum(different for _, different in outcomes),
        )

    async def _send(self, clip: Clip, places: asyncio.Semaphore) -> tuple[float, bool]:
        async with places:
            start = time.perf_counter()
            reply = await self._client.post(
                f"{self._url}/v1/audio/transcriptions",
                files={"file": (clip.name, clip.data)},
                data={"model": "whisper-1"},
            )
            latency_s = time.perf_counter() - start
        reply.raise_for_status()
        text: str = reply.json()["text"]
        return latency_s, self._answers.setdefault(clip.name, text) != text

    async def _replica(self) -> dict[str, Any]:
        """The replica's counters; a heartbeat brings them once a second."""
        await asyncio.sleep(1.5)
        replica: dict[str, Any] = (await self._client.get(f"{self._url}/load")).json()["replicas"][0]
        return replica


class _Health:
    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.latencies_s: list[float] = []
        self._client = client
        self._url = url

    async def run(self) -> None:
        while True:
            start = time.perf_counter()
            (await self._client.get(f"{self._url}/health")).raise_for_status()
            self.latencies_s.append(time.perf_counter() - start)
            await asyncio.sleep(HEALTH_EVERY_S)


def _batch_between(before: dict[str, Any], after: dict[str, Any]) -> float:
    steps = int(after["num_decode_steps"]) - int(before["num_decode_steps"])
    return (int(after["num_decoded_tokens"]) - int(before["num_decoded_tokens"])) / max(1, steps)


async def measure(url: str, clips: list[Clip], concurrencies: Iterable[int], repeats: int) -> list[Round]:
    rounds: list[Round] = []
    plan = [concurrency for _ in range(repeats) for concurrency in concurrencies]
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        load = Load(url, client)
        await load.round(clips, 1)  # warm-up, and the answers of each clip alone
        with Progress(console=Console(stderr=True)) as progress:
            for concurrency in progress.track(plan, description="rounds"):
                rounds.append(await load.round(clips, concurrency))  # noqa: PERF401
    return rounds


def show(rounds: list[Round], console: Console) -> None:
    table = Table("at once", "RTFx", "requests/s", "against 1", "latency p50 / p95")
    for heading in ("/health p50 / p99 / max", "decode batch", "answers changed"):
        table.add_column(heading)
    singles = [r.rtfx for r in rounds if r.concurrency == min(r.concurrency for r in rounds)]
    for concurrency in sorted({r.concurrency for r in rounds}):
        own = [r for r in rounds if r.concurrency == concurrency]
        ratios = [r.rtfx / single for r, single in zip(own, singles, strict=True)]
        latencies = [s for r in own for s in r.latencies_s]
        health = [s * 1000 for r in own for s in r.health_s]
        table.add_row(
            str(concurrency),
            _spread([r.rtfx for r in own], 0),
            _spread([r.requests_per_s for r in own], 1),
            _spread(ratios, 2),
            f"{_quantile(latencies, 0.5):.2f} / {_quantile(latencies, 0.95):.2f} s",
            f"{_quantile(health, 0.5):.1f} / {_quantile(health, 0.99):.1f} / {max(health):.1f} ms",
            _spread([r.decode_batch for r in own], 1),
            str(sum(r.num_different for r in own)),
        )
    console.print(table)


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="12 requests, 1 repeat")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    console = Console()
    console.print("command: python -m benchmarks.serving", *sys.argv[1:])
    console.print(
        f"machine: {platform.processor() or platform.machine()}, Python {platform.python_version()}"
    )
    clips = make_clips(12 if options.quick else options.requests)
    with running_server(options.model, "--dtype", options.dtype, "--served-model-name", "benchmarked") as url:
        rounds = asyncio.run(
            measure(url, clips, options.concurrency, 1 if options.quick else options.repeats)
        )
    show(rounds, console)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1) + "\n")
    if options.plot:
        plot(rounds, options.plot)


def plot(rounds: list[Round], path: Path) -> None:
    """RTFx and /health's 99th percentile over the concurrency."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.plot([r.concurrency for r in rounds], [r.rtfx for r in rounds], "o")
    left.set(xlabel="requests at once", ylabel="RTFx")
    right.plot([r.concurrency for r in rounds], [1000 * _quantile(r.health_s, 0.99) for r in rounds], "o")
    right.set(xlabel="requests at once", ylabel="/health, 99th percentile (ms)")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
