"""Follow who speaks through a recording of any length: samples in, turns out.

Windows of ten seconds, one every five, run by fours and in order. Voices (two kilobytes each) stay,
samples go. Embeddings live as long as their request and are never written. Knows no HTTP and no text.
"""

import asyncio
import base64
import binascii
import itertools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from string import ascii_uppercase
from typing import Final, NamedTuple

import msgspec
import numpy as np

from asr_server.annexes.speakers.clustering import Doubles, Flags, Floats, cluster, directions
from asr_server.annexes.speakers.labels import Turn, label_segments
from asr_server.annexes.speakers.segmentation import (
    FIRST_FRAME,
    FRAME,
    FRAME_S,
    NUM_FRAMES,
    STEP,
    STEP_FRAMES,
    WINDOW,
    segment,
)
from asr_server.annexes.speakers.voices import Activity, Heard, Voice, hear, hear_reference, nearest
from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import PreprocessPool, Recording, memory_file
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import SAMPLE_RATE, Samples, SpeakerCount, Transcript
from asr_server.errors import InvalidValue, RequestError
from asr_server.levels import Interval, joined, runs
from asr_server.machine import available_cores, lower_thread_priority

_NUM_TOGETHER: Final = 4  # windows that are heard at once
_BATCH: Final = WINDOW + (_NUM_TOGETHER - 1) * STEP  # their samples: 25 s
# Of a frame in the mean of both hearings: the segmentation is surest in the middle of a window. [2, half]
_WEIGHTS: Final = np.pad(
    np.sin(np.pi * (np.arange(NUM_FRAMES) + 0.5) / NUM_FRAMES) ** 2 + 1e-3, (0, 2 * STEP_FRAMES - NUM_FRAMES)
).reshape(2, STEP_FRAMES)
MAX_WAITING: Final = 2  # batches of one recording that are not heard yet, before its decoding waits
_SHORTEST_S: Final = 0.12  # of a turn
_PAUSE_S: Final = 0.25  # within a turn
# How much earlier speech begins, and later it ends, than it is likelier than not, by benchmarks/speakers.py.
_BEFORE_S, _AFTER_S = 0.02, 0.04
_NEARER: Final = 0.05  # cosine by which a stretch is nearer to another person than to its local speaker's

NICENESS: Final = 5  # of the threads: requests and the engine come first

NUM_THREADS: Final = max(2, available_cores() // 2)

_executor = ThreadPoolExecutor(
    NUM_THREADS, "asr-speakers", initializer=partial(lower_thread_priority, NICENESS)
)


class Person(NamedTuple):
    embedding: Floats  # [192] of length 1; zeros where too little is heard
    clean_s: float  # of speech alone


class Spoken(NamedTuple):
    turns: list[Turn]  # by start
    people: dict[str, Person]


class SpeakerTrack:
    """The speakers of one recording: known people by the names of their references, others A, B, C ..."""

    def __init__(
        self, count: SpeakerCount | None = None, references: Mapping[str, Floats] | None = None
    ) -> None:
        self._count, self._references = count or SpeakerCount(), references or {}
        self._buffer: list[Samples] = []
        self._num_buffered = 0
        self._heard: list[Future[list[Heard]]] = []
        self._is_closed = threading.Event()

    def push(self, samples: Samples) -> None:
        self._buffer.append(samples.copy())
        self._num_buffered += len(samples)
        while self._num_buffered >= _BATCH:
            joined = np.concatenate(self._buffer)
            self._hear(joined[:_BATCH].copy())
            self._buffer = [joined[_NUM_TOGETHER * STEP :].copy()]
            self._num_buffered = len(self._buffer[0])

    def _hear(self, samples: Samples) -> None:
        before = self._heard[-1] if self._heard else None
        start = len(self._heard) * _NUM_TOGETHER * STEP
        self._heard.append(_executor.submit(self._unless_closed, samples, start, before))

    def _unless_closed(self, samples: Samples, start: int, before: Future[list[Heard]] | None) -> list[Heard]:
        if self._is_closed.is_set():
            return []
        log_probabilities = segment(samples)
        # The threads take batches in order: the one before is done, or under way in another thread.
        heard = before.result()[-1:] if before else []
        for number, each in enumerate(log_probabilities):
            window = samples[number * STEP : number * STEP + WINDOW]
            stretches = heard[-1].stretches if heard else []
            heard.append(hear(window, each, start + number * STEP, stretches))
        return heard[-len(log_probabilities) :]

    async def wait_for_room(self) -> None:
        """Wait while MAX_WAITING batches are queued, to hold back the decoder."""
        if len(self._heard) > MAX_WAITING:
            await asyncio.wrap_future(self._heard[-MAX_WAITING - 1])

    async def spoken(self, known: Mapping[str, Person] | None = None) -> Spoken:
        """Return who spoke, after the last samples; `known` people keep their names, as `references` do."""
        if self._num_buffered > SAMPLE_RATE // 4 and (not self._heard or self._num_buffered > WINDOW - STEP):
            self._hear(np.concatenate(self._buffer))
        self._buffer = []
        windows = [window for heard in self._heard for window in await asyncio.wrap_future(heard)]
        before = {name: person.embedding for name, person in (known or {}).items()}
        loop, people = asyncio.get_running_loop(), {**self._references, **before}
        return await loop.run_in_executor(_executor, self._stitch, windows, people)

    async def label(self, transcript: Transcript, tokenizer: Tokenizer) -> Transcript:
        """Return the transcript with a speaker for each word."""
        spoken, loop = await self.spoken(), asyncio.get_running_loop()
        arguments = transcript.segments, spoken.turns, tokenizer.decode_bytes
        segments = await loop.run_in_executor(_executor, label_segments, *arguments)
        return msgspec.structs.replace(transcript, segments=tuple(segments))

    def close(self) -> None:
        self._is_closed.set()
        self._buffer, self._heard = [], []

    def _stitch(self, windows: list[Heard], references: Mapping[str, Floats]) -> Spoken:
        voices = [(number, voice) for number, window in enumerate(windows) for voice in window.voices]
        if not any(voice.clean_s for _, voice in voices):
            return Spoken([], {})
        embeddings = np.stack([voice.embedding for _, voice in voices])
        clean_s = np.array([voice.clean_s * bool(voice.embedding.any()) for _, voice in voices])
        # Two halves of one local speaker may be one person after all.
        apart = [-1 - place if voice.is_half else number for place, (number, voice) in enumerate(voices)]
        alike = [cosine for window in windows for cosine in window.alike]
        narrow = np.array([voice.is_narrow for _, voice in voices])
        labels, known = cluster(
            embeddings, clean_s, np.array(apart), self._count, alike, narrow, [*references.values()]
        )
        of_labels = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
        means = directions(of_labels, embeddings, clean_s)
        activity: list[dict[int, Floats]] = [{} for _ in windows]
        for (number, voice), own in zip(voices, labels.tolist(), strict=True):
            for label, likely in _by_stretch(voice, number * STEP, own, means):
                before = activity[number].get(label, np.float32(0))
                halves = np.pad(likely, (0, 2 * STEP_FRAMES - NUM_FRAMES)).reshape(2, STEP_FRAMES)
                activity[number][label] = np.maximum(before, halves.astype(np.float32))
        spoken = _spoken_s(activity)
        turns = {label: turns for label, stretches in spoken.items() if (turns := _turns(stretches))}
        names = names_of_labels(turns, known, [*references])
        ordered = sorted(
            Turn(*stretch, names[label]) for label, stretches in turns.items() for stretch in stretches
        )
        people = {
            name: Person(means[label], float(clean_s[labels == label].sum())) for label, name in names.items()
        }
        return Spoken(ordered, people)


def _by_stretch(voice: Voice, start: int, own: int, means: Floats) -> Iterator[tuple[int, Activity]]:
    """Yield the voice's activity by label; a stretch goes to whom it sounds like of `means`.

    `start` is the first sample of its window, `own` its label.
    """
    rest = voice.activity
    for number, stretch in enumerate(voice.stretches):
        scores = means @ stretch.embedding
        best = int(scores.argmax())
        if scores[best] > scores[own] + _NEARER:
            is_of_stretch = nearest([[each] for each in voice.stretches], start) == number
            yield best, voice.activity * is_of_stretch
            rest = rest * ~is_of_stretch
    yield own, rest


def names_of_labels(
    spoken: Mapping[int, list[Interval]], known: Mapping[int, int], names: Sequence[str]
) -> dict[int, str]:
    """Return each label's name: that of its reference, or the next letter by who spoke first."""
    lengths = (itertools.product(ascii_uppercase, repeat=length) for length in itertools.count(1))
    letters = (name for name in map("".join, itertools.chain.from_iterable(lengths)) if name not in names)
    return {
        label: names[known[label]] if label in known else next(letters)
        for label in sorted(spoken, key=lambda label: spoken[label][0])
    }


def _spoken_s(activity: Sequence[Mapping[int, Floats]]) -> dict[int, list[Interval]]:
    """Join each window's probabilities, [2, STEP_FRAMES] a speaker."""
    spoken: dict[int, list[Interval]] = {}
    for number in range(len(activity) + 1):
        total = np.zeros(STEP_FRAMES)
        sums: dict[int, Doubles] = {}
        for half, window in ((0, number), (1, number - 1)):
            if 0 <= window < len(activity):
                total += _WEIGHTS[half]
                for label, likely in activity[window].items():
                    sums[label] = sums.get(label, np.zeros(STEP_FRAMES)) + _WEIGHTS[half] * likely[half]
        for label, summed in sums.items():
            spoken.setdefault(label, []).extend(_intervals_s(summed > total / 2, number * STEP))
    return spoken


def _intervals_s(active: Flags, first_sample: int) -> list[Interval]:
    first_s = (first_sample + FIRST_FRAME - FRAME / 2) / SAMPLE_RATE
    return [
        (first_s + start * FRAME_S - _BEFORE_S, first_s + end * FRAME_S + _AFTER_S)
        for start, end in runs(active).tolist()
    ]


def _turns(intervals_s: list[Interval]) -> list[Interval]:
    return [
        (start_s, end_s) for start_s, end_s in joined(intervals_s, _PAUSE_S) if end_s - start_s >= _SHORTEST_S
    ]


# -- References of known speakers: data URLs of a few seconds, which live as long as their request -----------

_PARAM: Final = "known_speaker_references[]"
MIN_S, MAX_S = 2.0, 10.0
_SLACK_S: Final = 0.1  # that codecs add or take away
_LIMITS: Final = AudioLimits(max_audio_s=4 * MAX_S)
_DATA_URL: Final = re.compile(r"data:[\w.+/;=-]*;base64,", re.ASCII)


async def follow_speakers(
    count: SpeakerCount, names: Sequence[str], references: Sequence[str], pool: PreprocessPool
) -> SpeakerTrack:
    """Raises InvalidValue for a reference without speech."""
    urls = zip(names, references, strict=True)
    embeddings = await reference_embeddings({name: await decode_reference(url, pool) for name, url in urls})
    if not all(embedding.any() for embedding in embeddings.values()):
        raise InvalidValue(f"In one of '{_PARAM}' nobody speaks.", _PARAM)
    return SpeakerTrack(count, embeddings)


async def reference_embeddings(references: Mapping[str, Samples]) -> dict[str, Floats]:
    loop, heard = asyncio.get_running_loop(), dict[str, Floats]()
    for name, samples in references.items():
        heard[name] = await loop.run_in_executor(_executor, hear_reference, samples)
    return heard


async def decode_reference(url: str, pool: PreprocessPool) -> Samples:
    match = _DATA_URL.match(url)
    try:
        content = base64.b64decode(url[match.end() :], validate=True) if match else b""
    except binascii.Error:
        content = b""
    if not content:
        raise InvalidValue(f"'{_PARAM}' are data URLs: data:audio/wav;base64,...", _PARAM)
    heard: list[Samples] = []
    with memory_file() as file:
        file.write(content)
        with Recording(file, _LIMITS, listener=lambda samples: heard.append(samples.copy())) as recording:
            try:
                while not (await pool.decode_slice(recording)).finished:
                    pass
            except RequestError as error:
                raise InvalidValue(f"One of '{_PARAM}' cannot be read: {error.message}", _PARAM) from error
    samples = np.concatenate(heard)
    if not MIN_S - _SLACK_S <= len(samples) / SAMPLE_RATE <= MAX_S + _SLACK_S:
        raise InvalidValue(
            f"'{_PARAM}' are {MIN_S:g} to {MAX_S:g} s long; one has {len(samples) / SAMPLE_RATE:.1f} s.",
            _PARAM,
        )
    return samples
