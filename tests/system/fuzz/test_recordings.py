"""WAV files put together from odd chunks, and damaged files of every format: each is read or refused."""

import contextlib
import struct
from pathlib import Path

import psutil
import pytest
from hypothesis.strategies import SearchStrategy, binary, builds, integers, lists, one_of, sampled_from

from asr_server.errors import RequestError
from tests.system.fuzz.fuzzing import fuzz, fuzzing
from tests.unit.audio.audio_files import chunks_of
from tests.unit.audio.hostile import mutated
from tests.unit.audio.test_hostile import originals

ODD = (0, 1, 2, 3, 4, 8, 16, 18, 24, 32, 40, 64, 255, 0x7FFF, 0xFFFE, 0xFFFF)
SIZES = (*ODD, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF8, 0xFFFFFFFF)


def chunk(name: bytes, content: bytes, claimed: int | None) -> bytes:
    return name + struct.pack("<I", len(content) if claimed is None else claimed) + content


def format_chunk(tag: int, channels: int, rate: int, frame: int, bits: int, more: bytes) -> bytes:
    return chunk(b"fmt ", struct.pack("<HHIIHH", tag, channels, rate, rate, frame, bits) + more, None)


def wav_files() -> SearchStrategy[bytes]:
    short, long = sampled_from(ODD), sampled_from((8000, 16_000, 44_100, *SIZES))
    formats = builds(
        format_chunk, sampled_from((1, 3, 6, 7, 0xFFFE, 2, 0)), short, long, short, short, binary(max_size=30)
    )
    usual = builds(format_chunk, sampled_from((1, 3)), sampled_from((1, 2)), long, short, short, binary())
    names = sampled_from((b"data", b"ds64", b"LIST", b"JUNK", b"fact", b"\0\0\0\0"))
    claims = sampled_from((None, None, None, *SIZES))
    others = builds(chunk, names, binary(max_size=400), claims)
    heads = sampled_from(
        (b"RIFF\xff\xff\xff\xffWAVE", b"RF64\xff\xff\xff\xffWAVE", b"RIFF\0\0\0\0WAVE", b"RIFX")
    )
    parts = lists(one_of(formats, usual, others), max_size=5).map(b"".join)
    data = builds(chunk, sampled_from((b"data",)), integers(0, 4000).map(bytes), claims)
    return builds(lambda *all_parts: b"".join(all_parts), heads, parts, data)


@fuzzing
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_odd_wav_files_and_damaged_files_of_every_format_are_read_or_refused(tmp_path: Path) -> None:
    files = originals(tmp_path)

    def damaged(seed: int) -> bytes:
        name = sorted(files)[seed % len(files)]
        return next(mutated({name: files[name]}, 1, seed))[1]

    def check(content: bytes) -> None:
        with contextlib.suppress(RequestError):
            chunks_of(content)

    chunks_of(files["a.m4a"])  # the decode processes are started
    fuzz(one_of(wav_files(), integers(0, 1 << 40).map(damaged)), check, psutil.Process())
