"""Long files over HTTP: every format says the same, times run forward, and chunks lose or double nothing."""

import asyncio
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import soundfile
from openai import AsyncOpenAI
from rapidfuzz.distance import Levenshtein

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.transcription.segments import FRAMES_PER_S, rest_of
from harness.engine_helpers import Reference
from tests.conftest import Server, run_server
from tests.contract.official_client import plain, transcribe
from tests.support.long_recordings import LongRecording, digits_not_whole, long_recording
from tests.support.speech import digits_of
from tests.unit.api.sample_files import sound_file
from tests.unit.transcription.pipeline import chunks_of
from tests.unit.transcription.transformers_reading import Parts, read_chunks

PATIENCE_S: Final = 1800.0  # a busy machine takes its time
MAX_DRAWN_SHARE: Final = 0.02
MAX_ERROR_SHARE: Final = 0.03  # of the embedded model; at most 0.015 of a part was seen
MAX_OFF_S: Final = 0.2  # where the same text is heard, read again from a few samples earlier or later
FORMATS: Final = ("json", "text", "srt", "vtt")
WORDS: Final[dict[str, Any]] = {
    "response_format": "verbose_json",
    "timestamp_granularities": ["word", "segment"],
}


async def answers(client: AsyncOpenAI, recording: LongRecording, formats: Sequence[str] = FORMATS) -> Any:
    """verbose_json with words, once the stream and other formats are found to say the same and its times to
    hold.
    """
    file = sound_file(recording.samples, "FLAC")
    verbose, events, *others = await asyncio.gather(
        transcribe(client, file, **WORDS),
        events_of(client, file),
        *(transcribe(client, file, response_format=response_format) for response_format in formats),
    )
    for response_format, answer in zip(formats, others, strict=True):
        assert plain(answer, response_format) == verbose.text
    assert "".join(event.delta for event in events[:-1]) == events[-1].text
    assert events[-1].text == verbose.text
    assert " ".join(word.word for word in verbose.words) == verbose.text
    check_times(verbose, recording)
    return verbose


async def events_of(client: AsyncOpenAI, file: bytes) -> list[Any]:
    return [event async for event in await transcribe(client, file, stream=True)]


def as_sent(recording: LongRecording) -> Samples:
    """In 16 bits."""
    samples, _ = soundfile.read(io.BytesIO(sound_file(recording.samples, "FLAC")), dtype="float32")
    return np.asarray(samples, np.float32)


def check_times(verbose: Any, recording: LongRecording) -> None:
    assert verbose.duration == pytest.approx(recording.duration_s, abs=1e-3)
    assert [segment.id for segment in verbose.segments] == list(range(len(verbose.segments)))
    for parts in (verbose.segments, verbose.words):
        times = [time for part in parts for time in (part.start, part.end)]
        assert times == sorted(times), "they run backwards"
        assert times[0] >= 0
        assert times[-1] <= verbose.duration


@pytest.fixture(scope="module")
def exact_server() -> Iterator[Server]:
    """As transformers is compared with it, whatever the machine: in float32, and without a beam search, which
    would find other texts where they are likelier.
    """
    with run_server("--dtype", "float32", "--beam-size", "1") as server:
        yield server


@pytest.fixture(scope="module")
def reference() -> Reference:
    """transformers."""
    return Reference(EMBEDDED_MODEL)


def check_chunks(recording: LongRecording, verbose: Any, reference: Reference) -> None:
    """No cut goes through a digit, and each stretch between two cuts is read in the file as transformers
    reads it alone, but for what is left out where nobody speaks, and what is heard behind a pause that
    transformers passes over. So what is lost or doubled is lost or doubled by the model, in audio without a
    cut, and not by cutting.
    """
    chunks = chunks_of(EMBEDDED_MODEL, as_sent(recording))
    assert digits_not_whole(recording, chunks) == []
    tokenizer = Tokenizer.from_directory(EMBEDDED_MODEL)
    alone = read_chunks(reference, tokenizer, chunks, "en")
    again = read_chunks(reference, tokenizer, list(passed_over(verbose.segments, chunks, alone)), "en")
    alone |= again
    drawn = {segment.seek for segment in verbose.segments if segment.temperature > 0}
    assert len(drawn) <= MAX_DRAWN_SHARE * len(chunks)  # of these one text is as good as another
    expected = {
        (seek, each)
        for seek, tokens in alone.items()
        for each in segments_of(tokens, tokenizer)
        if seek not in drawn
    }
    heard = [(segment.seek, tuple(segment.tokens)) for segment in verbose.segments]
    found = [segment for segment in heard if segment[0] not in drawn]
    assert len(set(found)) == len(found), "one is there twice"
    for seek, tokens in set(found) - expected:  # from within a frame of what `seek` says, audio is read again
        assert any(is_alike(tokenizer, tokens, each) for each in segments_of(again.get(seek, ()), tokenizer))
    middles_s = np.array([np.mean(times) for turn in recording.turns for times in turn.times])
    for first_s, end_s in (span_s(tokenizer, *each) for each in found):
        middles_s = middles_s[(middles_s < first_s - MAX_OFF_S) | (end_s + MAX_OFF_S < middles_s)]
    for first_s, end_s in (span_s(tokenizer, *each) for each in expected - set(found)):
        assert not ((first_s < middles_s) & (middles_s < end_s)).any(), "left out where somebody speaks"


def passed_over(segments: Sequence[Any], chunks: Sequence[Chunk], read: Parts) -> Iterator[Chunk]:
    """What chunks hold behind pauses, from where the server has read it again."""
    for seek in {segment.seek for segment in segments} - read.keys():
        start = seek * SAMPLE_RATE // FRAMES_PER_S
        chunk = next(c for c in chunks if 0 < start - c.start_sample < len(c.samples))
        yield rest_of(chunk, start - chunk.start_sample)


def is_alike(tokenizer: Tokenizer, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """The same text, at about the same time."""
    first_time = tokenizer.specials.timestamp_begin
    return len(one) == len(other) and all(
        a == b or (min(a, b) >= first_time and abs(a - b) * tokenizer.time_precision_s <= MAX_OFF_S)
        for a, b in zip(one, other, strict=True)
    )


def span_s(tokenizer: Tokenizer, seek: int, tokens: tuple[int, ...]) -> tuple[float, float]:
    """By the timestamps around the text: from and to, on the recording's clock."""
    times = [(token - tokenizer.specials.timestamp_begin) * tokenizer.time_precision_s for token in tokens]
    return seek / FRAMES_PER_S + times[0], seek / FRAMES_PER_S + times[-1]


def segments_of(tokens: tuple[int, ...], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Cut between two timestamps side by side. One without text is none."""
    is_time = [token >= tokenizer.specials.timestamp_begin for token in tokens]
    borders = [i for i in range(1, len(tokens)) if is_time[i - 1] and is_time[i]]
    parts = [tokens[first:end] for first, end in pairwise([0, *borders, len(tokens)])]
    return [part for part in parts if tokenizer.decode(part).strip()]


async def test_turns_and_noises_are_the_same_in_every_format(client: AsyncOpenAI) -> None:
    await answers(client, long_recording(12.0, seed=1))


@pytest.mark.trial
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(12))
async def test_two_hours_in_twelve_parts_lose_and_double_nothing(
    exact_server: Server, reference: Reference, seed: int
) -> None:
    recording = long_recording(600.0, seed=seed)
    async with AsyncOpenAI(
        base_url=f"{exact_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        verbose = await answers(client, recording, ("json", "srt"))
    check_chunks(recording, verbose, reference)
    truth = "".join(turn.digits for turn in recording.turns)
    errors = Counter(edit.tag for edit in Levenshtein.editops(truth, digits_of(verbose.text)))
    print(f"part {seed}: {len(truth)} digits, {dict(errors)}")
    assert errors.total() <= MAX_ERROR_SHARE * len(truth)
