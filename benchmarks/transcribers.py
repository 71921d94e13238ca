"""The systems that `benchmarks.accuracy` and `benchmarks.peers` compare: recordings in, their texts out.

All are given the same checkpoint, in the format that each reads, and the language of each recording. Ours is
the whole server over HTTP and gets the files, many at once; the others are libraries and get samples, one
recording after another, which is how they are called.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.running_server import running_server
from harness.checkpoint_formats import as_ctranslate2, as_ggml
from harness.speech import Clip
from harness.speech.error_rates import TimedWord

REQUESTS_AT_ONCE = 16
BATCH = 16


class Heard(NamedTuple):
    text: str
    words: list[TimedWord]  # empty where none were asked for


class Task(NamedTuple):
    checkpoint: Path  # in Hugging Face's layout
    url: str = ""  # of a server that runs; empty: one is started
    with_times: bool = False
    at_once: int = REQUESTS_AT_ONCE


Report = Callable[[Clip, Heard], None]  # called for each recording when it is done
Transcribe = Callable[[Sequence[Clip], Report], None]
System = Callable[[Task], AbstractContextManager[Transcribe]]


@contextmanager
def ours(task: Task, *, dtype: str = "auto") -> Iterator[Transcribe]:
    with ThreadPoolExecutor(task.at_once) as threads:
        if task.url:
            yield _over_http(task, task.url, threads)
            return
        with running_server(str(task.checkpoint), "--dtype", dtype) as url:
            yield _over_http(task, url, threads)


def _over_http(task: Task, url: str, threads: ThreadPoolExecutor) -> Transcribe:
    form: dict[str, Any] = {"response_format": "verbose_json"} if task.with_times else {}
    if task.with_times:
        form["timestamp_granularities[]"] = ["word"]

    def transcribe(clips: Sequence[Clip], report: Report) -> None:
        with httpx.Client(base_url=url, timeout=3600) as client:
            form["model"] = client.get("/v1/models").json()["data"][0]["id"]

            def one(clip: Clip) -> None:
                reply = client.post(
                    "/v1/audio/transcriptions",
                    files={"file": (clip.path.name, clip.path.read_bytes())},
                    data=form | {"language": clip.language},
                )
                if reply.status_code != 200:
                    raise RuntimeError(f"{clip.name}: {reply.status_code} {reply.text}")
                body = reply.json()
                words = [TimedWord(w["word"], w["start"], w["end"]) for w in body.get("words") or ()]
                report(clip, Heard(body["text"], words))

            for _ in threads.map(one, clips):
                pass

    return transcribe


@contextmanager
def openai_whisper(task: Task, **options: Any) -> Iterator[Transcribe]:
    from harness.openai_whisper import load_openai_whisper

    model = load_openai_whisper(task.checkpoint)

    def one(clip: Clip) -> Heard:
        answer = model.transcribe(
            clip.samples(), language=clip.language, word_timestamps=task.with_times, fp16=False, **options
        )
        words = [word for segment in answer["segments"] for word in segment.get("words", ())]
        return Heard(
            answer["text"], [TimedWord(w["word"], float(w["start"]), float(w["end"])) for w in words]
        )

    yield _one_by_one(one)


@contextmanager
def faster_whisper(task: Task, *, dtype: str, batched: bool = False, **options: Any) -> Iterator[Transcribe]:
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    threads = len(os.sched_getaffinity(0))
    model = WhisperModel(
        str(as_ctranslate2(task.checkpoint)), device="cpu", compute_type=dtype, cpu_threads=threads
    )
    recognise = (
        partial(BatchedInferencePipeline(model).transcribe, batch_size=BATCH) if batched else model.transcribe
    )

    def one(clip: Clip) -> Heard:
        segments, _ = recognise(
            clip.samples(), language=clip.language, word_timestamps=task.with_times, **options
        )
        read = list(segments)
        words = [word for segment in read for word in segment.words or ()]
        return Heard(
            "".join(segment.text for segment in read),
            [TimedWord(word.word, float(word.start), float(word.end)) for word in words],
        )

    yield _one_by_one(one)


@contextmanager
def transformers(task: Task) -> Iterator[Transcribe]:
    import torch
    import transformers as library

    pipeline: Any = library.pipeline
    model, kind = str(task.checkpoint), "automatic-speech-recognition"
    recognise = pipeline(kind, model=model, device="cpu", dtype=torch.float32)
    recognise.model.generation_config.max_length = None

    def one(clip: Clip) -> Heard:
        answer = recognise(
            clip.samples(),
            return_timestamps="word" if task.with_times else True,
            generate_kwargs={"language": clip.language, "task": "transcribe"},
        )
        chunks = answer["chunks"] if task.with_times else []
        words = [TimedWord(c["text"], c["timestamp"][0], c["timestamp"][1]) for c in chunks]
        return Heard(answer["text"], [word for word in words if word.end_s is not None])

    yield _one_by_one(one)


@contextmanager
def whisper_cpp(task: Task) -> Iterator[Transcribe]:
    from pywhispercpp.model import Model

    threads = len(os.sched_getaffinity(0))
    model = Model(
        str(as_ggml(task.checkpoint)),
        n_threads=threads,
        redirect_whispercpp_logs_to=os.devnull,
        print_progress=False,
        print_realtime=False,
    )

    def one(clip: Clip) -> Heard:
        segments = model.transcribe(clip.samples(), language=clip.language)
        return Heard("".join(segment.text for segment in segments), [])

    yield _one_by_one(one)


def _one_by_one(one: Callable[[Clip], Heard]) -> Transcribe:
    def transcribe(clips: Sequence[Clip], report: Report) -> None:
        for clip in clips:
            report(clip, one(clip))

    return transcribe


GREEDY: dict[str, Any] = {"beam_size": None, "best_of": None, "condition_on_previous_text": False}
SYSTEMS: dict[str, System] = {
    "ours": ours,
    "ours float32": partial(ours, dtype="float32"),
    "ours int8": partial(ours, dtype="int8"),
    "openai-whisper greedy": partial(openai_whisper, **GREEDY),
    "openai-whisper": partial(openai_whisper, beam_size=5, best_of=5),  # as its command line does
    "faster-whisper int8": partial(faster_whisper, dtype="int8"),
    "faster-whisper float32": partial(faster_whisper, dtype="float32"),
    "faster-whisper float32 voice filter": partial(faster_whisper, dtype="float32", vad_filter=True),
    "faster-whisper batched int8": partial(faster_whisper, dtype="int8", batched=True),
    "faster-whisper batched float32": partial(faster_whisper, dtype="float32", batched=True),
    "transformers": transformers,
    "whisper.cpp": whisper_cpp,
}
NEEDS = {"faster-whisper": "faster_whisper", "openai-whisper": "whisper", "whisper.cpp": "pywhispercpp"}


def package_of(system: str) -> str:
    """The package that a system needs besides ours."""
    return next((package for prefix, package in NEEDS.items() if system.startswith(prefix)), system)
