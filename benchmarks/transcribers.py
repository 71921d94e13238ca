"""The systems that `benchmarks.accuracy` compares: each takes a recording to its text and its words' times.

`http` is a server, `ours` its pipeline without HTTP, the engine in this process; `ours_whole_windows` is the
same with chunks as long as the model's window, so that a file of at most 30 s is not cut at all. The others
get arrays and read long files their own way: one window after another, each from where the last text ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import httpx
import numpy as np

from asr_server.checkpoint import AudioWindow
from asr_server.config import Settings
from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.running_server import running_server
from benchmarks.scoring import TimedWord

REQUESTS_AT_ONCE = 8


@dataclass(frozen=True)
class Spoken:
    """A line of the manifest."""

    audio: Path
    text: str
    language: str
    times: tuple[tuple[float, float], ...]  # of each word of the text; empty: not known


class Heard(NamedTuple):
    text: str
    words: list[TimedWord]


@dataclass(frozen=True)
class Task:
    model: str
    url: str  # of a server that runs; empty: one is started
    with_times: bool


Report = Callable[[], None]  # one more file is done
Transcribe = Callable[[list[Spoken], Report], list[Heard]]


@contextmanager
def http(task: Task) -> Iterator[Transcribe]:
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        if task.url:
            yield _over_http(task.url, threads, task)
            return
        with running_server(task.model) as url:
            yield _over_http(url, threads, task)


def _over_http(url: str, threads: ThreadPoolExecutor, task: Task) -> Transcribe:
    form: dict[str, Any] = {"response_format": "verbose_json"}
    if task.with_times:
        form["timestamp_granularities[]"] = ["word"]

    def transcribe(files: list[Spoken], report: Report) -> list[Heard]:
        with httpx.Client(base_url=url, timeout=3600) as client:
            form["model"] = client.get("/v1/models").json()["data"][0]["id"]

            def one(spoken: Spoken) -> Heard:
                with spoken.audio.open("rb") as file:
                    reply = client.post(
                        "/v1/audio/transcriptions",
                        files={"file": file},
                        data=form | {"language": spoken.language},
                    )
                reply.raise_for_status()
                report()
                body = reply.json()
                words = [TimedWord(w["word"], w["start"], w["end"]) for w in body.get("words", ())]
                return Heard(body["text"], words)

            return list(threads.map(one, files))

    return transcribe


@contextmanager
def ours(task: Task) -> Iterator[Transcribe]:
    yield _pipeline(Settings(model=task.model, executor="inline"), task)


@contextmanager
def ours_whole_windows(task: Task) -> Iterator[Transcribe]:
    window_s = AudioWindow.from_directory(Path(task.model)).duration_s
    yield _pipeline(Settings(model=task.model, executor="inline", max_chunk_s=window_s), task)


def _pipeline(settings: Settings, task: Task) -> Transcribe:
    from asr_server.offline import LocalTranscriber
    from asr_server.offline.job import TranscribeJob

    async def transcribe(files: list[Spoken], report: Report) -> list[Heard]:
        transcriber = LocalTranscriber(settings, TranscribeJob((), word_timestamps=task.with_times))
        places = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def one(spoken: Spoken) -> Heard:
            options = transcriber.options_for(spoken.language, None)
            async with places:
                transcript = await transcriber.transcribe(spoken.audio, lambda *_: None, options)
            report()
            return Heard(transcript.text, [TimedWord(*w) for w in _fields(transcript.words)])

        async with transcriber.running():
            return await asyncio.gather(*map(one, files))

    return lambda files, report: asyncio.run(transcribe(files, report))


def _fields(words: Any) -> Iterator[tuple[str, float, float]]:
    for word in words:
        yield word.text, word.start_s, word.end_s


@contextmanager
def transformers(task: Task) -> Iterator[Transcribe]:
    from transformers import pipeline

    recognise: Any = pipeline("automatic-speech-recognition", model=task.model, device="cpu")
    recognise.model.generation_config.max_length = None

    def one(spoken: Spoken) -> Heard:
        answer = recognise(
            _samples(spoken.audio),
            return_timestamps="word" if task.with_times else True,
            generate_kwargs={"language": spoken.language, "task": "transcribe"},
        )
        chunks = answer["chunks"] if task.with_times else []
        words = [TimedWord(c["text"], c["timestamp"][0], c["timestamp"][1]) for c in chunks]
        return Heard(answer["text"], [word for word in words if word.end_s is not None])

    yield _one_by_one(one)


@contextmanager
def faster_whisper(task: Task) -> Iterator[Transcribe]:
    from ctranslate2.converters import TransformersConverter
    from faster_whisper import WhisperModel

    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "model"
        files = ["tokenizer.json", "preprocessor_config.json"]
        TransformersConverter(task.model, copy_files=files).convert(str(converted))
        model = WhisperModel(str(converted), device="cpu", compute_type="float32")

        def one(spoken: Spoken) -> Heard:
            segments, _ = model.transcribe(
                _samples(spoken.audio),
                language=spoken.language,
                word_timestamps=task.with_times,
                suppress_tokens=_suppressed(task.model),
            )
            read = list(segments)
            words = [
                TimedWord(w.word, float(w.start), float(w.end))
                for segment in read
                for w in segment.words or ()
            ]
            return Heard("".join(segment.text for segment in read), words)

        yield _one_by_one(one)


@contextmanager
def openai_whisper(task: Task) -> Iterator[Transcribe]:
    import whisper.decoding
    import whisper.transcribe  # noqa: F401  the module, which a function of that name hides

    from tests.engine.openai_whisper import load_openai_whisper

    model = load_openai_whisper(Path(task.model))
    modules = (sys.modules["whisper.transcribe"], sys.modules["whisper.decoding"])

    def one(spoken: Spoken) -> Heard:
        answer = sys.modules["whisper.transcribe"].transcribe(
            model,
            _samples(spoken.audio),
            language=spoken.language,
            word_timestamps=task.with_times,
            suppress_tokens=_suppressed(task.model),
            fp16=False,
        )
        found = [word for segment in answer["segments"] for word in segment.get("words", ())]
        return Heard(
            answer["text"], [TimedWord(w["word"], float(w["start"]), float(w["end"])) for w in found]
        )

    tokenizer = _openai_tokenizer(Path(task.model))
    with (
        mock.patch.object(modules[0], "get_tokenizer", tokenizer),
        mock.patch.object(modules[1], "get_tokenizer", tokenizer),
    ):
        yield _one_by_one(one)


def _openai_tokenizer(directory: Path) -> Callable[..., Any]:
    """In the place of openai/whisper's `get_tokenizer`: with the checkpoint's own vocabulary."""
    import tiktoken
    from whisper.tokenizer import Tokenizer

    from asr_server.tokenizer import Tokenizer as Ours

    ours = Ours.from_directory(directory)
    description = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in description["added_tokens"]}
    ranks = {
        ours.decode_bytes(token): token
        for token in description["model"]["vocab"].values()
        if ours.is_text(token)
    }
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding(directory.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=added)
    num_languages = len(ours.specials.languages)

    def get_tokenizer(
        multilingual: bool, *, language: str | None = None, task: str | None = None, **_: Any
    ) -> Any:
        is_multilingual = ours.specials.is_multilingual
        return Tokenizer(
            encoding,
            num_languages,
            language=language if is_multilingual else None,
            task=(task or "transcribe") if is_multilingual else None,
        )

    return get_tokenizer


def _suppressed(model: str) -> list[int]:
    return list(json.loads((Path(model) / "generation_config.json").read_text())["suppress_tokens"])


def _one_by_one(one: Callable[[Spoken], Heard]) -> Transcribe:
    def transcribe(files: list[Spoken], report: Report) -> list[Heard]:
        heard = []
        for spoken in files:
            heard.append(one(spoken))
            report()
        return heard

    return transcribe


def _samples(path: Path) -> Samples:
    import librosa

    samples, _ = librosa.load(path, sr=SAMPLE_RATE, mono=True)
    return np.asarray(samples, np.float32)


System = Callable[[Task], AbstractContextManager[Transcribe]]
SYSTEMS: dict[str, System] = {
    "http": http,
    "ours": ours,
    "ours_whole_windows": ours_whole_windows,
    "openai_whisper": openai_whisper,
    "transformers": transformers,
    "faster_whisper": faster_whisper,
}
