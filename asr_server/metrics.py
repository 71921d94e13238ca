"""Every metric that is counted as things happen: its name, its meaning, its labels.

They belong to the process, as its registry does. What can be read off the server when somebody asks, such as
queue lengths, is not here but in `api.metrics`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
)

from asr_server import __version__
from asr_server.core import ChunkTimes

REGISTRY: Final = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

_REQUEST_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_CHUNK_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def _histogram(name: str, meaning: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, meaning, labels, buckets=buckets, registry=REGISTRY)


def _counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(name, meaning, labels, registry=REGISTRY)


build_info: Final = Info("asr_build", "What is running.", registry=REGISTRY)
build_info.info({"version": __version__, "python": platform.python_version(), "torch": version("torch")})

# -- Requests -----------------------------------------------------------------------------------------------

requests: Final = _counter("asr_requests", "Requests answered.", ("route", "status"))
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
audio_received_seconds: Final = _counter(
    "asr_audio_received_seconds", "Audio decoded from uploads and taken in by realtime sessions."
)
audio_transcribed_seconds: Final = _counter(
    "asr_audio_transcribed_seconds", "Audio of requests and realtime turns whose text is final."
)
realtime_closed: Final = _counter(
    "asr_realtime_sessions_closed", "Realtime sessions ended or refused, by the close code.", ("code",)
)

# -- Preprocessing ------------------------------------------------------------------------------------------

preprocess_wait_seconds: Final = _histogram(
    "asr_preprocess_wait_seconds", "A slice's wait for a thread of the pool.", _CHUNK_BUCKETS_S
)
preprocess_seconds: Final = _histogram(
    "asr_preprocess_seconds", "Decoding, resampling and splitting of one slice.", _CHUNK_BUCKETS_S
)
decode_process_deaths: Final = _counter(
    "asr_decode_process_deaths", "Processes of FFmpeg that ended in the middle of a file."
)

# -- Chunks and replicas ------------------------------------------------------------------------------------

chunk_queue_seconds: Final = _histogram(
    "asr_chunk_queue_seconds", "A chunk's wait for a slot, earlier attempts included.", _CHUNK_BUCKETS_S
)
chunk_encode_seconds: Final = _histogram(
    "asr_chunk_encode_seconds", "A chunk's time in the encoder, with its batch.", _CHUNK_BUCKETS_S
)
chunk_decode_seconds: Final = _histogram(
    "asr_chunk_decode_seconds", "A chunk's time in the decoder, fallbacks included.", _CHUNK_BUCKETS_S
)
chunks_transcribed: Final = _counter("asr_chunks_transcribed", "Chunks with a result.")
chunks_retried: Final = _counter("asr_chunks_retried", "Chunks sent again as their replica was lost.")
chunks_failed: Final = _counter("asr_chunks_failed", "Chunks without a result.", ("reason",))
for _reason in ("engine_error", "replicas_ended", "no_engine", "shutting_down"):
    chunks_failed.labels(_reason)  # 0, not absent, before the first
replica_restarts: Final = _counter("asr_replica_restarts", "Starts in the place of a replica that was lost.")


def observe_chunk(total_s: float, times: ChunkTimes) -> None:
    """A chunk has a result, `total_s` after it came into the queue."""
    chunks_transcribed.inc()
    chunk_queue_seconds.observe(max(0.0, total_s - times.encode_s - times.decode_s))
    chunk_encode_seconds.observe(times.encode_s)
    chunk_decode_seconds.observe(times.decode_s)
