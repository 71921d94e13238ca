"""The audio front end against other ways of turning a file into 16 kHz mono.

    python -m benchmarks.frontend [--quick] [--json FILE] [--plot FILE]

Speed of one core (audio seconds per second of processor time, decode processes included), speed with more
threads, the event loop's delay meanwhile, and peak memory. All ways take turns in every round, so that a
noisy machine disturbs them alike; figures are medians over the rounds, with the range beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import audioread  # type: ignore[import-untyped]
import av
import librosa
import numpy as np
import psutil
import soundfile
import soxr
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from asr_server.audio import AudioLimits, PreprocessPool, Recording
from asr_server.config import Settings
from asr_server.core import Chunk, Samples

T = TypeVar("T")
VOICES = Path(__file__).parents[1] / "tests" / "data"
THREADS = (1, 2, 4, 8, 16)
PROCESSES = (1, 2)
MEASURE_S = 1.0  # by one thread; as long again by two with twice the files
# File name -> rate, channels, and FFmpeg's names of codec and container.
FORMATS: dict[str, tuple[int, int, str, str]] = {
    "wav 48k stereo": (48_000, 2, "pcm_s16le", "wav"),
    "wav 44.1k stereo": (44_100, 2, "pcm_s16le", "wav"),
    "wav 16k mono": (16_000, 1, "pcm_s16le", "wav"),
    "flac 16k mono": (16_000, 1, "flac", "flac"),
    "flac 44.1k stereo": (44_100, 2, "flac", "flac"),
    "mp3 44.1k stereo": (44_100, 2, "libmp3lame", "mp3"),
    "ogg vorbis 44.1k stereo": (44_100, 2, "libvorbis", "ogg"),
    "m4a 44.1k stereo": (44_100, 2, "aac", "ipod"),
    "webm opus 48k stereo": (48_000, 2, "libopus", "webm"),
}


# -- The files: digits in synthesised voices, one voice a server, and a room's noise. ---------------------


def recording(sample_rate: int, num_channels: int, duration_s: float) -> np.ndarray:
    """[frames, channels] float32."""
    rng = np.random.default_rng(0)
    channels = []
    for path in sorted(VOICES.glob("digits-*.flac"))[:num_channels]:
        speech, rate = soundfile.read(path, dtype="float32")
        speech = np.resize(speech, round(duration_s * rate))
        channels.append(soxr.resample(speech, rate, sample_rate)[: round(duration_s * sample_rate)])
    frames = np.stack(channels, axis=1)
    return frames + rng.normal(0, 1e-3, frames.shape).astype(np.float32)


def write(path: Path, name: str, duration_s: float) -> None:
    sample_rate, num_channels, codec, container = FORMATS[name]
    frames = recording(sample_rate, num_channels, duration_s)
    if codec in ("pcm_s16le", "flac", "libvorbis"):
        subtype = "VORBIS" if codec == "libvorbis" else "PCM_16"
        with soundfile.SoundFile(
            path, "w", sample_rate, num_channels, format=container.upper(), subtype=subtype
        ) as file:
            for at in range(0, len(frames), sample_rate):
                file.write(frames[at : at + sample_rate])
        return
    layout = "stereo" if num_channels == 2 else "mono"
    with av.open(str(path), "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=sample_rate, layout=layout)
        stream.bit_rate = 64_000 if codec == "libopus" else 128_000
        resampler = av.AudioResampler(stream.format, layout, sample_rate, stream.frame_size or 1024)
        for at in range(0, len(frames), sample_rate):
            part = np.ascontiguousarray(frames[at : at + sample_rate].T)
            frame = av.AudioFrame.from_ndarray(part, "fltp", layout)
            frame.sample_rate, frame.pts = sample_rate, at
            for packed in resampler.resample(frame):
                output.mux(stream.encode(packed))
        output.mux(stream.encode(None))


# -- The ways. Each returns the number of samples it made, or None where it cannot open the file. ----------

Way = Callable[[Path], int | None]


def ours(path: Path) -> int:
    num_samples, finished = 0, False
    with Recording(path, AudioLimits()) as recording:
        while not finished:
            pieces, finished = recording.next_slice()
            num_samples += sum(len(p.samples) if isinstance(p, Chunk) else p.num_samples for p in pieces)
    return num_samples


def by_librosa(path: Path) -> int | None:
    """Where libsndfile cannot, it runs the ffmpeg program, if there is one."""
    with warnings.catch_warnings(action="ignore"):
        try:
            return len(librosa.load(path, sr=16_000, mono=True)[0])
        except (soundfile.LibsndfileError, audioread.NoBackendError):
            return None


def by_pyav_frames(path: Path) -> int:
    """Each frame decoded, resampled and turned into an array by itself."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler("flt", "mono", 16_000)
        frames = [f.to_ndarray() for frame in container.decode(audio=0) for f in resampler.resample(frame)]
        frames += [f.to_ndarray() for f in resampler.resample(None)]
    return sum(frame.shape[1] for frame in frames)


def by_whole_file(path: Path) -> int:
    """As vLLM does it: the whole file, the mean over channels, PyAV's resampler, split afterwards."""
    try:
        samples, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError:
        samples, sample_rate = decode_whole(path)
    mono = samples.mean(axis=1)
    frame = av.AudioFrame.from_ndarray(mono[None], "fltp", "mono")
    frame.sample_rate = sample_rate
    resampler = av.AudioResampler("fltp", "mono", 16_000)
    parts = [*resampler.resample(frame), *resampler.resample(None)]
    return sum(map(len, split_afterwards(np.concatenate([part.to_ndarray()[0] for part in parts]))))


def decode_whole(path: Path) -> tuple[np.ndarray, int]:
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        return np.concatenate(frames, axis=1).T, container.streams.audio[0].rate


def split_afterwards(samples: Samples) -> Iterable[Samples]:
    """30 s clips, each cut at the quietest of ten 100 ms windows in its last second."""
    while len(samples) > 480_000:
        windows = samples[464_000:480_000].reshape(10, 1600)[:-1]
        cut = 464_000 + 1600 * int(np.argmin([np.sqrt(np.mean(window**2)) for window in windows]))
        yield samples[:cut]
        samples = samples[cut:]
    yield samples


WAYS: dict[str, Way] = {
    "ours": ours,
    "librosa.load": by_librosa,
    "PyAV per frame": by_pyav_frames,
    "whole file": by_whole_file,
}


# -- Measuring. --------------------------------------------------------------------------------------------


def cpu_s(run: Way, path: Path) -> float | None:
    """Processor time of one run: this process, those that decode for it, programs that have ended."""
    others = _others_s()
    start = time.process_time()
    if run(path) is None:
        return None
    own = time.process_time() - start
    return own + _others_s() - others


def _others_s() -> float:
    ended = os.times()
    total = ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        total += int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0]) / 1e9
    return total


def one_core(paths: dict[str, Path], rounds: int, duration_s: float, tick: Callable[[], None]) -> Any:
    """format -> way -> RTFx by processor time, one figure a round."""
    results: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in paths}
    for run in WAYS.values():  # code and libraries are loaded, the decode processes started
        run(paths["webm opus 48k stereo"])
        run(paths["wav 48k stereo"])
    for _ in range(rounds):
        for name, path in paths.items():
            for way, run in WAYS.items():
                if (seconds := cpu_s(run, path)) is not None:
                    results[name][way].append(duration_s / seconds)
                tick()
    return results


async def with_threads(path: Path, num_threads: int, num_files: int) -> tuple[int, float]:
    """How many files were read, and the wall-clock seconds. Two files are open for each thread, one after
    another and in step, so that all threads end together.
    """
    pool = PreprocessPool(num_threads)
    pool.warm_up()
    num_readers = 2 * num_threads
    files_each = max(1, num_files // num_readers)

    async def read() -> None:
        for _ in range(files_each):
            with Recording(path, AudioLimits()) as recording:
                while not (await pool.decode_slice(recording, Settings.chunks_ahead)).finished:
                    pass

    await asyncio.gather(*(pool.run(ours, path) for _ in range(num_threads)))  # everything is loaded
    start = time.perf_counter()
    await asyncio.gather(*(read() for _ in range(num_readers)))
    elapsed_s = time.perf_counter() - start
    await asyncio.to_thread(pool.shutdown)
    return num_readers * files_each, elapsed_s


async def speed(path: Path, num_threads: int, num_files: int, duration_s: float) -> float:
    """RTFx. Nothing else runs: whoever measures delays takes processor time when all cores are busy."""
    num_read, elapsed_s = await with_threads(path, num_threads, num_files)
    return num_read * duration_s / elapsed_s


async def loop_delays(work: Awaitable[Any]) -> list[float]:
    """In milliseconds, while the work goes on."""
    task = asyncio.ensure_future(work)
    delays = []
    while not task.done():
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        delays.append((time.perf_counter() - start) * 1000 - 1)
    await task
    return delays


async def our_delays(path: Path, num_files: int) -> list[float]:
    return await loop_delays(with_threads(path, 2, num_files))


async def rival_delays(path: Path, num_files: int) -> list[float]:
    """The same with the whole-file way in a thread pool."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(2) as pool:
        return await loop_delays(
            asyncio.gather(*(loop.run_in_executor(pool, by_whole_file, path) for _ in range(num_files)))
        )


def threads(paths: dict[str, Path], rounds: int, duration_s: float, tick: Callable[[], None]) -> Any:
    """format -> "threads" and "processes" -> number -> RTFx, "delay_p99_ms" -> way; a figure a round."""
    results: dict[str, Any] = {name: _empty_entry() for name in paths}
    for _ in range(rounds):
        for name, path in paths.items():
            entry, num_files = results[name], _files_for(path, MEASURE_S)
            for number in THREADS:
                work = speed(path, number, min(number, os.cpu_count() or 1) * num_files, duration_s)
                entry["threads"][str(number)].append(_run(work))
                tick()
            for number in PROCESSES:
                entry["processes"][str(number)].append(by_processes(path, number, num_files, duration_s))
                tick()
            for way, delays in (("ours", our_delays), ("whole file", rival_delays)):
                values = _run(delays(path, max(4, num_files if way == "ours" else 0)))
                entry["delay_p99_ms"][way].append(float(np.percentile(values, 99)))
                tick()
    return results


def _empty_entry() -> dict[str, dict[str, list[float]]]:
    return {
        "threads": {str(number): [] for number in THREADS},
        "processes": {str(number): [] for number in PROCESSES},
        "delay_p99_ms": {"ours": [], "whole file": []},
    }


def _run(work: Coroutine[Any, Any, T]) -> T:
    """In the event loop that the server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _files_for(path: Path, seconds: float) -> int:
    """How many files keep one thread busy for so long: a short measurement would be of its own start."""
    ours(path)
    start = time.perf_counter()
    ours(path)
    return max(2, round(seconds / (time.perf_counter() - start)))


def _read_in_process(path: Path, num_files: int, connection: Any) -> None:
    ours(path)
    connection.send("ready")
    connection.recv()
    for _ in range(num_files):
        ours(path)
    connection.send("done")


def by_processes(path: Path, num_processes: int, num_files: int, duration_s: float) -> float:
    """RTFx of processes that share nothing but the machine: what its cores and caches can give."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_processes)]
    processes = [
        context.Process(target=_read_in_process, args=(path, num_files, there)) for _, there in pipes
    ]
    for process in processes:
        process.start()
    for here, _ in pipes:
        here.recv()
    start = time.perf_counter()
    for here, _ in pipes:
        here.send("go")
    for here, _ in pipes:
        here.recv()
    elapsed_s = time.perf_counter() - start
    for process in processes:
        process.join()
    return num_processes * num_files * duration_s / elapsed_s


def _grown_mb(way: str, path: Path, connection: Any) -> None:
    WAYS[way](path.with_name("short"))  # code and libraries are loaded before counting
    before = _peak_mb()
    WAYS[way](path)
    connection.send(_peak_mb() - before)


def _peak_mb() -> float:
    family = (psutil.Process(), *psutil.Process().children(recursive=True))
    texts = [Path(f"/proc/{process.pid}/status").read_text() for process in family]
    return sum(int(text.split("VmHWM:")[1].split()[0]) for text in texts) / 1024


def memory(path: Path, tick: Callable[[], None]) -> dict[str, float]:
    """Peak memory in MB that one long file adds to that of a short one, each way in a process of its own."""
    results = {}
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_grown_mb, args=(way, path, sender))
        process.start()
        results[way] = receiver.recv()
        process.join()
        tick()
    return results


# -- Showing. ----------------------------------------------------------------------------------------------


def show(results: dict[str, Any], console: Console) -> None:
    if results["one_core"]:
        console.print(one_core_table(results["one_core"]))
    if results["threads"]:
        console.print(threads_table(results["threads"]))
    if results["memory_mb"]:
        grown = ", ".join(f"{way} {value:.0f}" for way, value in results["memory_mb"].items())
        console.print(f"Peak memory that {results['memory_s']:g} s of mp3 add, MB: {grown}")


def one_core_table(results: dict[str, Any]) -> Table:
    table = Table(title="RTFx of one core: median (lowest to highest)")
    for column in ("format", *WAYS, "ours / librosa", "ours / PyAV"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, ways in results.items():
        cells = [_spread(values) for values in ways.values()]
        ratios = [_ratio(ways, way) for way in ("librosa.load", "PyAV per frame")]
        table.add_row(name, *cells, *ratios)
    return table


def threads_table(results: dict[str, Any]) -> Table:
    table = Table(title="RTFx by threads; event loop's delay in ms, 99th percentile, with 2 threads")
    for column in ("format", *map(str, THREADS), "2 / 1", "2 / 1 processes", "ours", "whole file"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for name, entry in results.items():
        speeds = [f"{statistics.median(entry['threads'][str(number)]):,.0f}" for number in THREADS]
        scaling = [_scaling(entry[kind]) for kind in ("threads", "processes")]
        delays = [_spread(values, ".1f") for values in entry["delay_p99_ms"].values()]
        table.add_row(name, *speeds, *scaling, *delays)
    return table


def _scaling(speeds: dict[str, list[float]]) -> str:
    return _spread([two / one for one, two in zip(speeds["1"], speeds["2"], strict=True)], ".2f")


def _spread(values: list[float], form: str = ",.0f") -> str:
    if not values:
        return "not opened"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _ratio(ways: dict[str, list[float]], way: str) -> str:
    """Round by round, since what disturbs a round disturbs both."""
    if not ways[way]:
        return "-"
    return _spread([ours / other for ours, other in zip(ways["ours"], ways[way], strict=True)], ".2f")


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 6), layout="constrained")
    names = list(results["one_core"])
    for number, way in enumerate(WAYS):
        medians = [statistics.median(results["one_core"][name][way] or [0]) for name in names]
        left.barh(np.arange(len(names)) + 0.2 * number, medians, 0.2, label=way)
    left.set_yticks(np.arange(len(names)) + 0.3, names)
    left.invert_yaxis()
    left.set(xscale="log", xlabel="audio seconds per second of one core", title="One core")
    left.legend()
    for name, entry in results["threads"].items():
        medians = [statistics.median(entry["threads"][str(n)]) for n in THREADS]
        right.plot(THREADS, medians, marker="o", label=name)
    right.set(xscale="log", yscale="log", xlabel="threads", ylabel="audio seconds per second")
    right.set_xticks(THREADS, [str(n) for n in THREADS])
    right.set_title(results["machine"])
    right.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def machine() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = text.split("model name")[1].split(":")[1].split("\n")[0].strip() if "model name" in text else "?"
    return f"{os.cpu_count()} x {model}, {platform.machine()}, Python {platform.python_version()}"


def command() -> str:
    return " ".join(["python", "-m", "benchmarks.frontend", *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="shorter files: to see that it runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration", type=float, default=600.0, help="seconds of each recording")
    parser.add_argument("--parts", default="one_core,threads,memory", help="what to measure")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--plot", type=Path, help="write a plot there")
    arguments = parser.parse_args()
    duration_s = 60.0 if arguments.quick else arguments.duration
    console = Console(width=180)
    console.print("command:", command())
    console.print("machine:", machine())
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        results = measure(Path(folder), duration_s, arguments.rounds, arguments.parts.split(","), progress)
    results |= {"command": command(), "machine": machine(), "duration_s": duration_s}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    show(results, console)
    if arguments.plot:
        plot(results, arguments.plot)


def measure(
    folder: Path, duration_s: float, rounds: int, parts: list[str], progress: Progress
) -> dict[str, Any]:
    steps = len(FORMATS) * (1 + rounds * (len(WAYS) + len(THREADS) + len(PROCESSES) + 2)) + len(WAYS)
    task = progress.add_task("writing, then measuring", total=steps)

    def tick() -> None:
        progress.advance(task)

    paths = {}
    for number, name in enumerate(FORMATS):
        paths[name] = folder / str(number)
        write(paths[name], name, duration_s)
        tick()
    write(folder / "short", "mp3 44.1k stereo", 30.0)
    long_s = 6 * duration_s
    write(folder / "long", "mp3 44.1k stereo", long_s)
    return {
        "one_core": one_core(paths, rounds, duration_s, tick) if "one_core" in parts else {},
        "threads": threads(paths, rounds, duration_s, tick) if "threads" in parts else {},
        "memory_mb": memory(folder / "long", tick) if "memory" in parts else {},
        "memory_s": long_s,
    }


if __name__ == "__main__":
    main()
