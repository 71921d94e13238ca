"""Where a track begins on its file's clock, what follows an MP4, and what a track says of itself."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from av.stream import Disposition

from asr_server.audio.ffmpeg_decoder import FfmpegDecoder, _TimeLine, another_file_follows, tracks_of
from asr_server.core import Track
from tests.audio.audio_files import Sound, opened, voice, write_film
from tests.audio.test_decoders import all_of
from tests.memory_file import MemoryFile


def box(name: bytes, size: int = 8, content: bytes = b"") -> bytes:
    return struct.pack(">I4s", size, name) + content


FTYP = box(b"ftyp")
LONG = box(b"ftyp", 1, struct.pack(">Q", 24) + bytes(8))


@pytest.mark.parametrize(
    ("data", "follows"),
    [
        *((FTYP + box(b"moov", 12, bytes(4)) + FTYP, True), (FTYP + box(b"moov", 12, bytes(4)), False)),
        *((LONG + FTYP, True), (LONG + box(b"free"), False)),
        *((box(b"free") + FTYP + FTYP, False), (FTYP + box(b"free", 7) + FTYP, False), (b"", False)),
        *((FTYP + box(b"free") * 9998 + FTYP, True), (FTYP + box(b"free") * 9999 + FTYP, False)),
        (FTYP + box(b"mdat", 16) + FTYP, False),
        *(
            (b"FORM\0\0\0\4AIFFFORM", True),
            (b"FORM\0\0\0\4AIFFform", False),
            (b"FORM\0\0\0\5AIFFFORM", False),
        ),
    ],
)
def test_another_file_is_found_by_its_boxes(data: bytes, follows: bool) -> None:
    with MemoryFile(data) as file:
        assert another_file_follows(file.fileno()) == follows


@pytest.mark.parametrize(
    ("first_s", "start_s", "duration_s", "lead_s"),
    [
        *((2.125, 2.0, 4.0, 0.125), (2.09375, 2.0, 4.0, 0.0)),
        *((6.0, 2.0, 4.0, 0.0), (5.96875, 2.0, 4.0, 3.96875)),
        *((2.0, None, 4.0, 0.0), (2.0, 1.0, None, 0.0), (1.0, 2.0, 4.0, 0.0), (None, 0.0, 4.0, 0.0)),
    ],
)
def test_a_track_begins_behind_its_file_by_more_than_a_tenth_of_a_second(
    first_s: float | None, start_s: float | None, duration_s: float | None, lead_s: float
) -> None:
    def ticks(time_s: float | None, per_s: int) -> int | None:
        return None if time_s is None else round(time_s * per_s)

    file = SimpleNamespace(
        format=SimpleNamespace(name="matroska"),
        start_time=ticks(start_s, 1_000_000),
        duration=ticks(duration_s, 1_000_000),
    )
    first = SimpleNamespace(pts=ticks(first_s, 32), samples=8000, sample_rate=16_000)
    line = _TimeLine(file, SimpleNamespace(time_base=Fraction(1, 32)), first)
    assert line.lead_s == lead_s
    assert line.start_s == (first_s or 0.0) - lead_s
    assert [line.gap_before(first), line.gap_before(SimpleNamespace(**vars(first) | {"pts": None}))] == [
        lead_s,
        0,
    ]
    assert line.end_s == (first_s or 0.0) + 1.0


def test_a_track_says_its_language_its_title_and_whether_it_is_an_extra() -> None:
    def stream(disposition: Disposition, **metadata: str) -> Any:
        return SimpleNamespace(disposition=disposition, metadata=metadata)

    streams = [
        stream(Disposition.default, language="ger", title="x" * 81),
        stream(Disposition.comment, language="und", title=""),
        stream(Disposition.visual_impaired | Disposition.default),
    ]
    assert tracks_of(SimpleNamespace(streams=SimpleNamespace(audio=streams))) == [
        Track(1, "ger", "x" * 80, is_default=True),
        Track(2, is_extra=True),
        Track(3, is_default=True, is_extra=True),
    ]


@pytest.mark.parametrize(
    ("container", "picture_s", "duration_s"),
    [("mp4", 0.0, 2.0), ("mp4", 6.0, 6.0), ("matroska", 6.0, 6.0), ("adts", 0.0, None)],
)
def test_a_file_is_expected_to_last_as_it_states(
    tmp_path: Path, container: str, picture_s: float, duration_s: float | None
) -> None:
    start_s = 4.0 if picture_s else 0.0
    sound = Sound(voice(48_000, 1, 2.0), start_s=start_s)
    path = write_film(tmp_path / "a", container, [sound], picture_s)
    decoder = FfmpegDecoder(opened(path))
    if duration_s is not None:
        assert decoder.duration_s == pytest.approx(duration_s, abs=0.06)
    frames = all_of(decoder)
    assert len(frames) / 48_000 == pytest.approx(duration_s or 2.0, abs=0.06)
    assert not np.any(frames[: round(48_000 * max(0.0, start_s - 0.05))])
    assert not decoder.truncated
