"""The metrics that a server starts with, and what one request adds to them and to its own line."""

import json
import subprocess
import sys
import time
from typing import get_args

import pytest

from asr_server import __version__, metrics
from asr_server.core import DroppedReason
from asr_server.metrics import MAX_STAGES, REGISTRY, ReadAgainReason, RequestStats, Stage
from asr_server.transport.messages import ChunkTimes


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


class Added:
    """What is added to a series from now on."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = name, labels
        self._before = value(name, **labels)

    def __call__(self) -> float:
        return round(value(self._name, **self._labels) - self._before, 6)


# -- At the start --------------------------------------------------------------------------------------------


def test_a_server_starts_with_every_reason_at_0_and_figures_of_its_process() -> None:
    code = (
        "import json; from asr_server.metrics import REGISTRY\n"
        "samples = [s for metric in REGISTRY.collect() for s in metric.samples]\n"
        "print(json.dumps([(s.name, s.labels, s.value) for s in samples]))"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    samples: list[tuple[str, dict[str, str], float]] = json.loads(output)
    reasons: dict[str, set[str]] = {}
    for name, labels, number in samples:
        if name.startswith("asr_") and name.endswith("_total") and labels:
            reasons.setdefault(name, set()).update(labels.values())
            assert number == 0, name
    ladder = {"0", "0.2", "0.4", "0.6", "0.8", "1"}
    assert reasons == {
        "asr_chunks_transcribed_total": ladder,
        "asr_fallbacks_total": ladder - {"0"},
        "asr_chunks_read_again_total": {*get_args(ReadAgainReason)},
        "asr_segments_dropped_total": {*get_args(DroppedReason)},
        "asr_chunks_failed_total": {"engine_error", "replicas_ended", "no_engine", "shutting_down"},
        "asr_replica_restarts_total": {"exited", "frozen", "hung", "not_ready", "failed_start"},
    }
    names = {name for name, _, _ in samples}
    assert {"process_resident_memory_bytes", "python_gc_collections_total"} <= names
    assert not {name for name in names if name.endswith("_created")}
    (build,) = [labels for name, labels, _ in samples if name == "asr_build_info"]
    assert build["version"] == __version__
    assert {*build} == {"version", "python", "torch"}


# -- One request ---------------------------------------------------------------------------------------------


def test_a_chunk_waits_then_is_encoded_then_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    sums = [Added(f"asr_chunk_{stage}_seconds_sum") for stage in ("queue", "encode", "decode")]
    stats = RequestStats()
    stats.timeline = []
    stats.on_chunk_times(100.0, ChunkTimes(encode_s=1.5, decode_s=2.0), chunk=7)
    assert [added() for added in sums] == [6.5, 1.5, 2.0]
    assert stats.timeline == [
        Stage("queue", 100.0, 106.5, 7),
        Stage("encode", 106.5, 108.0, 7),
        Stage("decode_text", 108.0, 110.0, 7),
    ]
    stats.on_chunk_times(109.0, ChunkTimes(encode_s=1.5, decode_s=2.0), chunk=8)  # clocks differ a little
    assert stats.summary()["stages_s"] == {"chunks_queued": 6.5, "chunks_encoded": 3.0, "chunks_decoded": 4.0}


def test_a_stage_is_timed_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stats = RequestStats()
    stats.timeline = []
    with pytest.raises(ZeroDivisionError), stats.stage("upload"):
        raise ZeroDivisionError
    with stats.stage("upload"):
        pass
    assert stats.timeline == [Stage("upload", 1.0, 3.0), Stage("upload", 10.0, 14.0)]
    assert stats.summary() == {"stages_s": {"upload": 6.0}}


def test_a_timeline_is_kept_where_it_is_wanted_up_to_its_most() -> None:
    stats = RequestStats()
    stats.note("a", 0.0, 1.0)
    assert stats.timeline is None
    stats.timeline = []
    for number in range(300):
        stats.note("a", number, number + 1)
    assert [stage.began_at for stage in stats.timeline] == list(range(MAX_STAGES))
    assert MAX_STAGES == 256


@pytest.mark.parametrize(("audio_s", "took_s", "counted"), [(6.0, 2.0, 1), (0.0, 2.0, 0), (6.0, 0.0, 0)])
def test_speed_is_counted_where_audio_was_transcribed(
    audio_s: float, took_s: float, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("asr_request_audio_seconds_sum", "asr_request_rtfx_sum", "asr_request_rtfx_count")
    added = [Added(name, route="/speed") for name in names]
    clock = iter([1.0, 1.0 + took_s])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stats = RequestStats()
    stats.on_audio(audio_s, "en")
    with stats.stage("transcription"):
        pass
    stats.on_answered("/speed")
    assert [each() for each in added] == [6.0 * counted, 3.0 * counted, counted]


def test_work_of_the_pool_counts_its_wait_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, worked = (Added(f"asr_preprocess_{name}seconds_sum") for name in ("wait_", ""))
    stats = metrics.begin_request_stats(lambda: "/a")
    stats.timeline = []
    monkeypatch.setattr(time, "monotonic", lambda: 17.0)
    metrics.on_preprocessed(10.0, 12.0)
    assert (waited(), worked()) == (2.0, 5.0)
    assert stats.timeline == [Stage("decode_audio", 12.0, 17.0)]
