"""Define the counters and histograms, and what is noted of one request (`RequestStats`). Imports no torch.

What is read off the state when somebody asks is in `annexes/monitoring/metrics.py`.
"""

import platform
import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

import prometheus_client as prometheus
from prometheus_client import Counter, Histogram

from asr_server import __version__
from asr_server.core import TEMPERATURE_LADDER, ChunkResult, DroppedReason
from asr_server.transport.messages import ChunkTimes, Submit

ReadAgainReason = Literal[
    "unread_tail",
    "speech_passed_over",
    "uncut",
    "prompt_repeated",
    "language_outvoted",
    "language_doubtful",
    "replica_lost",
]
RestartReason = Literal["exited", "frozen", "hung", "not_ready", "failed_start"]
UNKNOWN_LANGUAGE: Final = "unknown"

# A further series beside each counter and histogram, which nobody reads.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
REGISTRY: Final = prometheus.CollectorRegistry()
prometheus.ProcessCollector(registry=REGISTRY)
prometheus.GCCollector(registry=REGISTRY)

_REQUEST_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_AUDIO_BUCKETS_S: Final = (1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)
_RTFX_BUCKETS: Final = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_CHUNK_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _histogram(name: str, meaning: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, meaning, labels, buckets=buckets, registry=REGISTRY)


def _counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(name, meaning, labels, registry=REGISTRY)


build_info: Final = prometheus.Info("asr_build", "What is running.", registry=REGISTRY)
build_info.info({"version": __version__, "python": platform.python_version(), "torch": version("torch")})

requests: Final = _counter("asr_requests", "Requests answered.", ("route", "status"))
request_errors: Final = _counter(
    "asr_request_errors", "Requests answered with an error, by its code.", ("route", "code")
)
request_seconds: Final = _histogram(
    "asr_request_seconds", "From a request's first byte to its answer's last.", _REQUEST_BUCKETS_S, ("route",)
)
requests_stalled: Final = _counter(
    "asr_requests_stalled", "Requests ended because nothing of them moved any more."
)
first_text_seconds: Final = _histogram(
    "asr_time_to_first_text_seconds",
    "From the complete upload to the first text that is final.",
    _REQUEST_BUCKETS_S,
)
request_audio_seconds: Final = _histogram(
    "asr_request_audio_seconds", "Audio transcribed for one request.", _AUDIO_BUCKETS_S, ("route",)
)
request_rtfx: Final = _histogram(
    "asr_request_rtfx",
    "Seconds of audio by seconds from the complete upload to the transcript, waits included.",
    _RTFX_BUCKETS,
    ("route",),
)
audio_received_seconds: Final = _counter(
    "asr_audio_received_seconds", "Audio decoded from uploads and taken in by realtime sessions."
)
audio_transcribed_seconds: Final = _counter(
    "asr_audio_transcribed_seconds",
    "Audio of requests and realtime turns with final text.",
    ("route", "language"),
)
realtime_closed: Final = _counter(
    "asr_realtime_sessions_closed", "Realtime sessions ended, by the close code.", ("code",)
)

preprocess_wait_seconds: Final = _histogram(
    "asr_preprocess_wait_seconds", "A task's wait for a thread of the pool.", _CHUNK_BUCKETS_S
)
preprocess_seconds: Final = _histogram(
    "asr_preprocess_seconds", "Decoding of one slice, or hearing of one chunk.", _CHUNK_BUCKETS_S
)
decode_process_deaths: Final = _counter(
    "asr_decode_process_deaths", "Processes of FFmpeg that ended in the middle of a file."
)

chunk_queue_seconds: Final = _histogram(
    "asr_chunk_queue_seconds", "A chunk's wait for a slot, earlier attempts included.", _CHUNK_BUCKETS_S
)
chunk_encode_seconds: Final = _histogram(
    "asr_chunk_encode_seconds", "A chunk's time in the encoder, with its batch.", _CHUNK_BUCKETS_S
)
chunk_decode_seconds: Final = _histogram(
    "asr_chunk_decode_seconds", "A chunk's time in the decoder, fallbacks included.", _CHUNK_BUCKETS_S
)
chunks_transcribed: Final = _counter(
    "asr_chunks_transcribed", "Results, by the temperature of the try that was kept.", ("temperature",)
)
fallbacks: Final = _counter(
    "asr_fallbacks", "Tries above a chunk's first, by the temperature tried.", ("temperature",)
)
chunks_read_again: Final = _counter(
    "asr_chunks_read_again", "Chunks read again, all or in part.", ("reason",)
)
segments_dropped: Final = _counter(
    "asr_segments_dropped", "Segments that a model wrote where nobody speaks.", ("reason",)
)
words_guessed: Final = _counter(
    "asr_words_guessed", "Words with times by their letters, because the replica that read them was lost."
)
chunks_failed: Final = _counter("asr_chunks_failed", "Chunks without a result.", ("reason",))
replica_restarts: Final = _counter(
    "asr_replica_restarts", "Starts in the place of a replica that was lost.", ("reason",)
)
for _of_kind, _kinds in (
    (chunks_transcribed, [f"{temperature:g}" for temperature in TEMPERATURE_LADDER]),
    (fallbacks, [f"{temperature:g}" for temperature in TEMPERATURE_LADDER[1:]]),
    (chunks_read_again, get_args(ReadAgainReason)),
    (segments_dropped, get_args(DroppedReason)),
    (chunks_failed, ("engine_error", "replicas_ended", "no_engine", "shutting_down")),
    (replica_restarts, get_args(RestartReason)),
):
    for _kind in _kinds:
        _of_kind.labels(_kind)  # 0, not absent, before the first


MAX_STAGES: Final = 256  # of a timeline, from the first on: a recording of hours has thousands


class Stage(NamedTuple):
    name: str
    began_at: float  # of time.monotonic()
    ended_at: float
    chunk: int | None = None


class Account(Protocol):
    """A key with a name, which pays for a request."""

    name: str
    models: tuple[str, ...] | None
    is_admin: bool
    audio_s: float
    answers: Tally[int]  # by status

    def enter(self) -> AbstractContextManager[None]: ...
    def require_room(self) -> None: ...
    def require_audio(self) -> None: ...
    def spend_audio(self, duration_s: float) -> None: ...
    def headers(self) -> dict[str, str]: ...


class RequestStats:
    """Sum up one request's work, for its log line and `/metrics`. `route` is known late."""

    def __init__(self, route: Callable[[], str] = lambda: "other") -> None:
        self._route = route
        self._num_chunks = 0
        self._first_text_s = 0.0
        self._fallbacks = Tally[str]()  # by temperature
        self._read_again = Tally[ReadAgainReason]()
        self._segments_dropped = Tally[DroppedReason]()
        self._audio_s: defaultdict[str, float] = defaultdict(float)  # by language
        self._stages_s: defaultdict[str, float] = defaultdict(float)
        self.asked_for: dict[str, Any] = {}  # model, format and so on, once they are known
        self.model = ""  # that serves it
        self.error_code = ""  # of its reply
        self.account: Account | None = None
        self.is_metered = False  # the limits of its account hold for it
        self.counts_audio_at_end = False  # what is tried again is paid for once
        self.timeline: list[Stage] | None = None  # of a request that is traced

    @property
    def key(self) -> str:
        return self.account.name if self.account else ""

    @property
    def audio_s(self) -> float:
        return sum(self._audio_s.values())

    def note(self, name: str, began_at: float, ended_at: float, chunk: int | None = None) -> None:
        if self.timeline is not None and len(self.timeline) < MAX_STAGES:
            self.timeline.append(Stage(name, began_at, ended_at, chunk))

    @contextmanager
    def stage(self, name: Literal["upload", "transcription", "render", "reply"]) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            ended_at = time.monotonic()
            self._stages_s[name] += ended_at - started_at
            if self.timeline is not None:
                self.timeline.append(Stage(name, started_at, ended_at))

    def on_chunk_times(self, queued_at: float, times: ChunkTimes, chunk: int) -> None:
        """Count a chunk that ends now: it waited, then was encoded, then decoded."""
        total_s = time.monotonic() - queued_at
        queued_s = max(0.0, total_s - times.encode_s - times.decode_s)
        stages = (
            ("chunks_queued", "queue", chunk_queue_seconds, queued_s),
            ("chunks_encoded", "encode", chunk_encode_seconds, times.encode_s),
            ("chunks_decoded", "decode_text", chunk_decode_seconds, times.decode_s),
        )
        began_at = queued_at
        for name, span_name, histogram, duration_s in stages:
            self._stages_s[name] += duration_s
            histogram.observe(duration_s)
            self.note(span_name, began_at, began_at + duration_s, chunk)
            began_at += duration_s

    def on_result(self, result: ChunkResult, submit: Submit) -> None:
        self._num_chunks += submit.id.part == 0
        chunks_transcribed.labels(_temperature_label(result.temperature)).inc()
        climbed = submit.options.temperatures[1 : 1 + result.num_fallbacks]
        for label in map(_temperature_label, climbed):
            self._fallbacks[label] += 1
            fallbacks.labels(label).inc()

    def on_read_again(self, reason: ReadAgainReason) -> None:
        self._read_again[reason] += 1
        chunks_read_again.labels(reason).inc()

    def on_segments_dropped(self, reason: DroppedReason, count: int) -> None:
        if count:
            self._segments_dropped[reason] += count
            segments_dropped.labels(reason).inc(count)

    def on_first_text(self, wait_s: float) -> None:
        first_text_seconds.observe(wait_s)
        self._first_text_s = self._first_text_s or wait_s

    def on_answered(self, route: str) -> None:
        if self.counts_audio_at_end:
            for language, spent_s in self._audio_s.items():
                self._count_audio(spent_s, language)
        audio_s, duration_s = self.audio_s, self._stages_s.get("transcription", 0.0)
        if audio_s and duration_s:
            request_audio_seconds.labels(route).observe(audio_s)
            request_rtfx.labels(route).observe(audio_s / duration_s)

    def on_audio(self, duration_s: float, language: str | None) -> None:
        if duration_s:
            self._audio_s[language or UNKNOWN_LANGUAGE] += duration_s
            if not self.counts_audio_at_end:
                self._count_audio(duration_s, language or UNKNOWN_LANGUAGE)

    def _count_audio(self, duration_s: float, language: str) -> None:
        audio_transcribed_seconds.labels(self._route(), language).inc(duration_s)
        if self.account:
            self.account.spend_audio(duration_s)

    def summary(self) -> dict[str, Any]:
        sums = self.asked_for | {
            "error": self.error_code,
            "key": self.key,
            "stages_s": _rounded(self._stages_s),
            "first_text_s": round(self._first_text_s, 3),
            "audio_s": round(self.audio_s, 3),
            "languages": _rounded(self._audio_s),
            "chunks": self._num_chunks,
            "fallbacks": dict(self._fallbacks),
            "read_again": dict(self._read_again),
            "segments_dropped": dict(self._segments_dropped),
        }
        shown = {name: value for name, value in sums.items() if value or isinstance(value, bool)}
        return {"fallbacks": {}} | shown if self._num_chunks else shown

    def __str__(self) -> str:
        """Return "; key web, audio 75.0 s, chunks 3, fallbacks 2", or nothing."""
        figures = {
            "error": self.error_code,
            "key": self.key,
            "audio": f"{self.audio_s:.1f} s" if self._audio_s else "",
            "chunks": self._num_chunks,
            "fallbacks": self._fallbacks.total(),
            "read again": self._read_again.total(),
            "segments dropped": self._segments_dropped.total(),
        }
        shown = ", ".join(f"{name} {value}" for name, value in figures.items() if value)
        return f"; {shown}" if shown else ""


def _rounded(durations_s: Mapping[str, float]) -> dict[str, float]:
    return {name: round(duration_s, 3) for name, duration_s in durations_s.items()}


def _temperature_label(temperature: float) -> str:
    return f"{temperature:g}" if temperature in TEMPERATURE_LADDER else "other"


_current_request_stats: Final = ContextVar[RequestStats]("_current_request_stats")


def begin_request_stats(route: Callable[[], str]) -> RequestStats:
    """Count this task and its children for one request from now on."""
    stats = RequestStats(route)
    _current_request_stats.set(stats)
    return stats


def current_request_stats() -> RequestStats:
    return _current_request_stats.get(None) or RequestStats()


def on_preprocessed(queued_at: float, started_at: float) -> None:
    """Count work of the pool that ends now, in the context of its request."""
    ended_at = time.monotonic()
    preprocess_wait_seconds.observe(started_at - queued_at)
    preprocess_seconds.observe(ended_at - started_at)
    current_request_stats().note("decode_audio", started_at, ended_at)
