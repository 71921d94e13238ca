"""Types that every package shares. Imports nothing of ours.

Audio is float32 mono at 16 kHz within [-1, 1]; times are seconds from the start of the file.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

SAMPLE_RATE: Final = 16_000
POSITIONS_PER_S: Final = 50  # of Whisper's encoder; its timestamps count in the same steps

Samples = npt.NDArray[np.float32]  # [num_samples], 16 kHz mono

Task = Literal["transcribe", "translate"]

# The temperatures at which a chunk is decoded one after another until the text is plausible (openai/whisper).
TEMPERATURE_LADDER: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Chunk(msgspec.Struct, frozen=True):
    """Audio of one window or less, cut at a quiet point. Silence between chunks is left out."""

    index: int  # 0, 1, 2 ... within the file
    start_sample: int  # from the start of the file
    samples: Samples
    channel: int = 0  # of the file, where its channels are kept apart

    @property
    def start_s(self) -> float:
        return self.start_sample / SAMPLE_RATE

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE


# Lengths below a whole window in which chunks are encoded, in positions: every half second up to 10 s, then
# every two, and beyond 20 s, where attention costs the most, every second. For each length that occurs oneDNN
# compiles kernels and keeps them: 4 MB for whisper-base.
SHORT_LENGTHS: Final = (*range(25, 500, 25), *range(500, 1000, 100), *range(1000, 1500, 50))
# Of silence that are always encoded after a chunk, where its window has them: 1.5 s. Of half a second too
# little hears that somebody has spoken: whisper-base then says the last sentence of several twice.
MARGIN_POSITIONS: Final = 75


@dataclass(frozen=True)
class AudioWindow:
    """The audio that the encoder takes at once, and how much a chunk should fill."""

    num_positions: int = 1500  # of the encoder
    max_chunk_s: float = 0.0  # what the checkpoint itself asks for; 0: nothing, its chunks fill the window
    short_lengths: tuple[int, ...] = ()  # in which chunks are encoded, but for the whole window
    padding: str = "silence"  # what follows a chunk in its window: silence, or zeros in the spectrogram

    @property
    def num_samples(self) -> int:
        return self.num_positions * SAMPLE_RATE // POSITIONS_PER_S

    @property
    def duration_s(self) -> float:
        return self.num_positions / POSITIONS_PER_S

    @property
    def chunk_s(self) -> float:
        """Return the longest chunk to cut."""
        return min(self.max_chunk_s or self.duration_s, self.duration_s)

    def for_short_audio(self, mode: str, lengths: tuple[int, ...] = SHORT_LENGTHS) -> Self:
        """Return the window that encodes chunks in the shortest of `lengths` (`tail`)."""
        if mode == "exact":
            return self
        return replace(self, short_lengths=tuple(n for n in lengths if n < self.num_positions))

    def positions_for(self, num_samples: int) -> int:
        least = -(-num_samples * POSITIONS_PER_S // SAMPLE_RATE) + MARGIN_POSITIONS
        return next((length for length in self.short_lengths if length >= least), self.num_positions)


LEAST_TEMPERATURE: Final = 1e-3  # scores divided by less overflow


def temperatures_for(temperature: float, ladder: tuple[float, ...]) -> tuple[float, ...]:
    return (temperature,) if temperature >= LEAST_TEMPERATURE else ladder


class DecodingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The options of one request's chunks. Timestamps are always decoded: they show an unread tail."""

    task: Task = "transcribe"
    language: str | None = None  # ISO code as in the checkpoint's <|xx|> tokens
    candidate_languages: tuple[str, ...] = ()  # detection is restricted to these; empty: all
    multilingual: bool = False  # what pauses part is read in the language that it alone seems to be in
    prompt_tokens: tuple[int, ...] = ()  # text tokens after <|startofprev|>
    keywords: tuple[str, ...] = ()  # get a bonus where the text is searched, or decoded greedily
    condition_on_previous_text: bool = False  # one chunk after another, the text so far as its prompt
    word_timestamps: bool = False  # align the text tokens with the audio once they are known
    text_only: bool = False  # nobody sees times: only a text that may lack words is aligned
    given_tokens: tuple[int, ...] = ()  # a text that is aligned with the audio; none is decoded
    draft_tokens: tuple[int, ...] = ()  # a guess at the result, timestamps included; changes its time alone
    urgency: int = 0  # 1: a speaker waits for it, so it goes first; -1: it waits for those in the engine
    full_letters: int = 0  # so many letters leave none of the chunk's speech without text; 0: unknown
    token_logprobs: bool = False  # tell of each token how likely it was
    early_results: bool = False  # report each segment as it is closed, where nothing can take it back
    streams: bool = False  # text is waited for: its first stretch is read alone until it has given some
    is_last_part: bool = False  # of its chunk: what it leaves unread is not read again
    temperatures: tuple[float, ...] = (0.0,)  # the fallback ladder; the first that passes is kept
    is_tentative: bool = False  # its last try ends, too, where it begins to repeat itself
    compression_ratio_threshold: float = 2.4
    logprob_threshold: float = -1.0
    no_speech_threshold: float = 0.6
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    max_new_tokens: int | None = None  # None: as many as the model has positions for


class ChunkId(msgspec.Struct, frozen=True, array_like=True):
    """One sending of one part of a chunk; answers to earlier attempts are dropped."""

    handle_id: str  # of its `RequestHandle`
    chunk: int
    part: int = 0
    attempt: int = 0


class ChunkResult(msgspec.Struct, frozen=True):
    """A replica's result: tokens and figures, never text."""

    tokens: tuple[int, ...]  # generated ones, timestamp tokens included, prompt and end-of-text not
    logprobs: tuple[float, ...]  # of each token, before temperature
    avg_logprob: float  # over the tokens and end-of-text, as openai-whisper counts it
    no_speech_prob: float
    compression_ratio: float
    temperature: float  # of the ladder's step that was kept
    language: str | None  # None where the checkpoint knows only one
    finish_reason: Literal["stop", "length"]
    # Where word times were asked for, else empty; in seconds from the start of the chunk. Of the text that is
    # read: what an unread tail holds is aligned when it is read again.
    token_times_s: tuple[float, ...] = ()  # when each text token begins, and last when the last one ends
    token_onsets_s: tuple[float, ...] = ()  # when a quarter of each text token's attention has come
    token_focus: tuple[float, ...] = ()  # the share of each text token's attention that lies in its time
    pauses_s: tuple[tuple[float, float], ...] = ()  # start and end of each pause in the audio, in order
    num_fallbacks: int = 0  # steps of the ladder that were tried above the first
    is_full: bool = False  # it has `full_letters`

    def is_silence(self, options: DecodingOptions) -> bool:
        """Return Whisper's judgement: probably no speech, and improbable text."""
        unlikely = self.avg_logprob < options.logprob_threshold
        return unlikely and self.no_speech_prob > options.no_speech_threshold

    def is_repetitive(self, options: DecodingOptions) -> bool:
        return self.compression_ratio > options.compression_ratio_threshold

    def is_implausible(self, options: DecodingOptions) -> bool:
        return self.avg_logprob < options.logprob_threshold or self.is_repetitive(options)

    def needs_fallback(self, options: DecodingOptions) -> bool:
        """Return whether Whisper tries the next temperature."""
        return self.is_implausible(options) and not self.is_silence(options)


class Word(msgspec.Struct, frozen=True):
    text: str  # as the model wrote it: with the space before it, and punctuation
    start_s: float
    end_s: float
    probability: float | None = None  # the mean of its tokens'; None after a replica was lost
    confidence: float | None = None  # the probability that it was said; None likewise


class Segment(msgspec.Struct, frozen=True):
    id: int
    seek: int  # 10 ms frames from the start of the file to the window that was read
    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()  # where word times were asked for
    speaker: str | None = None  # where speakers were asked for


class Clip(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float  # may be infinite


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


DroppedReason = Literal["judged_silence", "no_voice", "echo", "same_channel"]


class DroppedSegment(msgspec.Struct, frozen=True):
    start_s: float
    end_s: float
    text: str
    # Silence to the model, no voice to the detector, the sentence before again, a copy that is not read.
    reason: DroppedReason


class TranscriptDelta(msgspec.Struct, frozen=True):
    """Final text, in file order, never taken back. Segments come with a chunk's last delta."""

    text: str
    segments: tuple[Segment, ...]
    logprobs: tuple[TokenLogprob, ...]
    language: str | None
    num_audio_tokens: int
    num_text_tokens: int
    end_s: float  # in the file: everything before is final


class Track(msgspec.Struct, frozen=True):
    number: int  # from 1, among the audio tracks
    language: str | None = None  # as the file states it
    title: str | None = None
    is_default: bool = False  # the file marks it as the one to play
    is_extra: bool = False  # a commentary, or a description for people who cannot see


class SpeakerCount(msgspec.Struct, frozen=True):
    least: int = 1
    most: int | None = None


class Transcript(msgspec.Struct, frozen=True):
    text: str
    segments: tuple[Segment, ...]
    logprobs: tuple[TokenLogprob, ...]
    language: str  # the lower-case English name, as OpenAI spells it
    duration_s: float
    num_audio_tokens: int
    num_text_tokens: int
    task: Task = "transcribe"
    language_probability: float | None = None  # where it was detected, for the file as a whole
    languages: tuple[str, ...] = ()  # codes of those spoken, in the order heard; empty: nothing was said
    is_cut_short: bool = False  # the recording is damaged, and this is what could be read
    tracks: tuple[Track, ...] = ()  # that were read, of a file that has several
    dropped: tuple[DroppedSegment, ...] = ()  # in the order in which they were read

    @property
    def words(self) -> tuple[Word, ...]:
        return tuple(word for segment in self.segments for word in segment.words)
