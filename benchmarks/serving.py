"""The whole server over HTTP on loopback: bytes in, text out, and /health meanwhile.

    python -m benchmarks.serving        whisper-base, recordings of people as they are, 16 and 32 at once
    python -m benchmarks.serving --model small --requests 64 --concurrency 1 8 32
    python -m benchmarks.serving --shape large-v3-turbo --device cuda --tokens 100 --length 30 \\
        --concurrency 128 1 8 32 512 --formats wav,flac,mp3 wav flac mp3 --one-at-a-time --requests 512
    python -m benchmarks.serving --shape large-v3-turbo --device cuda --tokens 100 --length long \\
        --preprocess-workers 1 2 4 8 16 --concurrency 128 1     files of 14 to 22 minutes
    python -m benchmarks.serving --length 5 --concurrency 32 --jobs-h 0 10     without jobs beside, and with

Flags that take several values: every combination is measured, or with --one-at-a-time the first values of
all and each other value with the first ones of the rest. Throughput is seconds of audio over (last response -
first request); making the files is not counted, and no two are the same. Rounds are interleaved. Answers are
streamed; each is compared with the first one to the same file, which for the first 32 clips, or six long
files, is the one they get alone. Errors are counted where the words are known. --shape takes random weights
and --tokens a chunk of 30 s (of shorter clips four a second) instead of a checkpoint, and files of spoken
digits, as does any --length but `mixed`. A round in which a chunk has another number of tokens is an error.
The event loop's processor time for a request bounds how many a second one API process can take.
"""

import argparse
import asyncio
import json
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.progress import Progress

from asr_server.machine import default_preprocess_workers
from benchmarks.client import Answer, Client, connected, transcribe
from benchmarks.gpu_busy import GpuBusy
from benchmarks.health import HealthProbe, probing_health
from benchmarks.reporting import Budget, benchmark_parser, command, grid, machine, write_json
from benchmarks.running_server import START_LIMIT_S, running_server
from benchmarks.serving_report import Case, Round, figures, show
from benchmarks.uploads import (
    FORMATS,
    LONG_MINUTES,
    Upload,
    check_distinct,
    long_uploads,
    made_once,
    recordings_of_people,
)
from harness.checkpoints import SHAPES, add_checkpoints_option, fixed_checkpoint
from harness.real_weights import hugging_face_checkpoint
from harness.speech.error_rates import total, word_errors

HEARTBEAT_S = 1.5  # a little longer than the server's counters may be behind
MIB = 1 << 20
ENDPOINT = "/v1/audio/transcriptions"
LIMITS = ("--max-upload-bytes", str(64 * MIB), "--max-concurrent-requests", "1024")
AS_RECORDED = "as recorded"
CLIPS_ALONE = 32  # at most; these are heard one by one first
TOKENS_PER_S, WINDOW_S = 4, 30.0


class Load:
    """Posts to one server and watches it."""

    def __init__(
        self,
        client: Client,
        health: HealthProbe,
        busy: GpuBusy,
        fields: Mapping[str, str],
        process: psutil.Process,
        tokens_per_chunk: int = 0,
    ) -> None:
        """Args:
        process: the server's own, which answers.
        tokens_per_chunk: at most, of a checkpoint that never ends by itself; 0: as many as are said.
        """
        self._client, self._health, self._busy, self._fields = client, health, busy, fields
        self._process, self._tokens_per_chunk = process, tokens_per_chunk
        self._answers: dict[str, str] = {}
        self._steps, self._tokens = 0, 0

    async def warm_up(self, rounds: Sequence[tuple[Sequence[Upload], int]]) -> None:
        """Rounds that are not measured, each uploads and how many at once."""
        for uploads, concurrency in rounds:
            self._count_different(uploads, await self._send_all(uploads, concurrency))
        await self._decode_batch()

    async def round(self, uploads: Sequence[Upload], concurrency: int) -> Round:
        before, started, cpu_started = thread_times(self._process), time.perf_counter(), time.process_time()
        answers = await self._send_all(uploads, concurrency)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        loop_s, others_s = np.subtract(thread_times(self._process), before)
        gpu_busy, health_s = self._busy.share_since(started), self._health.latencies_since(started)
        return Round(
            wall_s=wall_s,
            rtfx=sum(upload.duration_s for upload in uploads) / wall_s,
            requests_per_s=len(uploads) / wall_s,
            latencies_s=[answer.total_s for answer in answers],
            first_text_s=[answer.first_text_s for answer in answers],
            num_tokens=sum(answer.num_tokens for answer in answers),
            health_s=health_s,
            gpu_busy=gpu_busy,
            client_busy=cpu_s / wall_s,
            event_loop_ms=1000 * loop_s / len(uploads),
            other_threads_ms=1000 * others_s / len(uploads),
            decode_batch=await self._decode_batch(),
            num_different=self._count_different(uploads, answers),
            error_rate=error_rate(uploads, answers),
        )

    async def _send_all(self, uploads: Sequence[Upload], concurrency: int) -> list[Answer]:
        places = asyncio.Semaphore(concurrency)
        return await asyncio.gather(*(self._send(upload, places) for upload in uploads))

    async def _send(self, upload: Upload, places: asyncio.Semaphore) -> Answer:
        async with places:
            language = {"language": upload.clip.language} if upload.clip else {}
            fields = {**self._fields, **language}
            if self._tokens_per_chunk:
                fields["max_completion_tokens"] = str(self.num_tokens(upload))
            answer = await transcribe(self._client, upload.name, upload.data, fields)
            if self._tokens_per_chunk:
                chunks, rest = divmod(answer.num_tokens, self.num_tokens(upload))
                is_asked = not rest and (chunks == 1 or (chunks > 1 and upload.duration_s > WINDOW_S))
                assert is_asked, f"{upload.name}: {answer.num_tokens} tokens, another work"
            return answer

    def num_tokens(self, upload: Upload) -> int:
        """Return the tokens of a chunk: people say some four a second."""
        return min(self._tokens_per_chunk, round(TOKENS_PER_S * upload.duration_s))

    def _count_different(self, uploads: Sequence[Upload], answers: Sequence[Answer]) -> int:
        """Answers that are not the first one to the same file."""
        first = [
            self._answers.setdefault(upload.name, answer.text)
            for upload, answer in zip(uploads, answers, strict=True)
        ]
        return sum(answer.text != text for answer, text in zip(answers, first, strict=True))

    async def _decode_batch(self) -> float:
        """The mean since it was last asked for. A heartbeat brings the replica's counters once a second."""
        await asyncio.sleep(HEARTBEAT_S)
        replica = (await self._client.get_json("/load"))["replicas"][0]
        steps, tokens = replica["num_decode_steps"], replica["num_decoded_tokens"]
        mean: float = (tokens - self._tokens) / max(1, steps - self._steps)
        self._steps, self._tokens = steps, tokens
        return mean


def thread_times(process: psutil.Process) -> tuple[float, float]:
    """Processor seconds of the event loop, in the thread with the process's number, and of all others."""
    times = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    event_loop = times.pop(process.pid)
    return event_loop, sum(times.values())


async def measure(
    url: str, cases: list[Case], options: argparse.Namespace, budget: Budget, write: Callable[[], None]
) -> None:
    """The rounds of one server, the cases taking turns. What there is, is written after each."""
    fields, tokens = ({"language": "en"}, options.tokens) if options.shape else ({}, 0)
    process = next(each for each in psutil.Process().children() if "serve" in each.cmdline())
    with probing_health(url) as health:
        async with connected(url) as client:
            load = Load(client, health, GpuBusy(), fields, process, tokens)
            alone = [
                (uploads_of(each, options)[: num_alone(each)], 1)
                for each in {case.files: case for case in cases}.values()
            ]
            largest = max(cases, key=lambda case: case.concurrency)
            together = uploads_of(largest, options)[: 4 * num_alone(largest)]
            await load.warm_up([*alone, (together, largest.concurrency)])
            with Progress(console=budget.console) as progress:
                turns = [case for _ in range(options.repeats) for case in cases]
                for case in progress.track(turns, description="rounds"):
                    if budget.allows(f"a round of {case}", case.rounds[-1].wall_s if case.rounds else 0):
                        with beside_jobs(url, case.jobs_h):
                            case.rounds.append(await load.round(uploads_of(case, options), case.concurrency))
                        write()


@contextmanager
def beside_jobs(url: str, hours: float) -> Iterator[None]:
    """Have so many hours of jobs under way, as a batch of equal recordings."""
    if not hours:
        yield
        return
    with httpx.Client(base_url=f"{url}/v1/", timeout=60) as client:

        def sent(content: bytes, purpose: str) -> str:
            answer = client.post("files", files={"file": content}, data={"purpose": purpose})
            return str(answer.raise_for_status().json()["id"])

        recording = sent(_made("long", "mp3", 1, False, None)[0].data, "user_data")
        body = {"model": "whisper-1", "language": "en", "file_id": recording}
        line = {"method": "POST", "url": ENDPOINT, "body": body}
        count = round(60 / LONG_MINUTES[0] * hours)
        lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(count))
        asked = {"input_file_id": sent(lines.encode(), "batch"), "endpoint": ENDPOINT}
        batch = client.post("batches", json=asked).raise_for_status().json()["id"]
        time.sleep(HEARTBEAT_S)  # until they have all of the engine
        yield
        assert client.post(f"batches/{batch}/cancel").json()["status"] == "cancelled", "the jobs ended first"


def error_rate(uploads: Sequence[Upload], answers: Sequence[Answer]) -> float | None:
    """Over all recordings whose words are known; None where there are none."""
    scores = [
        word_errors(upload.clip.text, answer.text, upload.clip.language)
        for upload, answer in zip(uploads, answers, strict=True)
        if upload.clip is not None and upload.clip.text is not None
    ]
    return total(scores).error_rate if scores else None


def uploads_of(case: Case, options: argparse.Namespace) -> list[Upload]:
    """As many as keep all places busy: several clips for each, within what was asked for; one long file."""
    if case.length == "long":
        count = max(len(LONG_MINUTES), *options.concurrency)
        wanted = max(len(LONG_MINUTES), case.concurrency)
    else:
        count, wanted = options.requests, max(CLIPS_ALONE, 4 * case.concurrency)
    return _made(case.length, case.formats, count, options.quick, options.uploads)[:wanted]


@cache
def _made(length: str, formats: str, count: int, quick: bool, kept: Path | None) -> list[Upload]:
    if formats == AS_RECORDED:
        uploads = recordings_of_people(count)
    elif length == "long" and quick:
        uploads = long_uploads(formats.split(","), 2, (1.0, 1.5))
    else:
        uploads = made_once(kept, length, formats, count)
    check_distinct(uploads)
    return uploads


def num_alone(case: Case) -> int:
    """So many of its files are heard one by one before the rounds, and four times as many together."""
    return len(LONG_MINUTES) if case.length == "long" else CLIPS_ALONE


@contextmanager
def server(preprocess_workers: int, options: argparse.Namespace) -> Iterator[str]:
    model = str(hugging_face_checkpoint(options.model)) if not options.shape else ""
    arguments = ["--dtype", options.dtype, "--device", options.device, *LIMITS]
    if options.shape:
        model = str(fixed_checkpoint(options.shape, options.checkpoints, options.device))
        arguments += ["--no-check-voice"]  # what random weights say is always in doubt
    arguments += ["--preprocess-workers", str(preprocess_workers), *shlex.split(options.serve)]
    if any(options.jobs_h):
        arguments += ["--jobs-dir", tempfile.mkdtemp()]
    options.started_with = shlex.join(arguments)
    with running_server(model, *arguments, start_limit_s=options.start_limit_s) as url:
        yield url


def plan(options: argparse.Namespace) -> list[Case]:
    files = (options.preprocess_workers, options.length, options.formats)
    points = grid([*files, options.concurrency, options.jobs_h], options.one_at_a_time)
    cases = [Case(*point) for point in points]
    for case in cases:
        if case.length == "mixed" and not options.shape:
            case.formats = AS_RECORDED
    return cases


def main() -> None:
    options = arguments()
    console = Console(width=160)
    console.print("command:", command())
    console.print("machine:", machine())
    cases, budget = plan(options), Budget(options.budget_s, console)

    def write() -> None:
        write_json(options.json, figures([case for case in cases if case.rounds], options))

    for workers in dict.fromkeys(case.preprocess_workers for case in cases):
        own = [case for case in cases if case.preprocess_workers == workers]
        if budget.allows(f"{workers} preprocess workers"):
            console.print("making the files")
            for case in own:
                uploads_of(case, options)
            console.print(f"a server with {workers} preprocess workers")
            with server(workers, options) as url:
                asyncio.run(measure(url, own, options, budget, write))
    measured = [case for case in cases if case.rounds]
    show(measured, console)
    console.print("the server's flags:", options.started_with)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__, has_budget=True)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of that shape instead")
    parser.add_argument("--tokens", type=int, default=100, help="of every chunk, with --shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64, help="distinct recordings")
    parser.add_argument("--length", nargs="+", default=["mixed"], help="seconds, mixed or long")
    parser.add_argument(
        "--formats", nargs="+", default=[",".join(FORMATS)], help="each a mix: wav, or wav,flac,mp3"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--jobs-h", nargs="+", type=float, default=[0.0], help="hours of jobs meanwhile")
    parser.add_argument("--preprocess-workers", type=int, nargs="+", default=[default_preprocess_workers()])
    parser.add_argument("--serve", default="", help="more flags for the server, as one string")
    parser.add_argument("--start-limit-s", type=float, default=START_LIMIT_S, help="until /ready is 200")
    parser.add_argument("--uploads", type=Path, help="keep the files made here, for other runs to read")
    parser.add_argument("--one-at-a-time", action="store_true", help="not every combination")
    parser.add_argument("--repeats", type=int, default=5)
    add_checkpoints_option(parser)
    parser.add_argument(
        "--quick", action="store_true", help="12 requests at most, 1 repeat, short long files"
    )
    options = parser.parse_args()
    options.started_with = ""
    if options.quick:
        options.requests, options.repeats = min(options.requests, 12), 1
        options.concurrency = list(dict.fromkeys(min(options.requests, n) for n in options.concurrency))
    return options


if __name__ == "__main__":
    main()
