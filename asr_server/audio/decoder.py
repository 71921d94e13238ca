"""How a file is decoded: within which limits, which of its tracks, and the protocol of its decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from asr_server.config import Settings, naming
from asr_server.core import SAMPLE_RATE, AudioWindow, Track
from asr_server.errors import (
    AudioTooLong,
    InvalidAudio,
    InvalidValue,
    NoSuchTrack,
    SampleRateTooHigh,
    TooManyChannels,
)
from asr_server.language_codes import whisper_code

RECORDING_FORMATS = "flac, mp3, mp4, mpeg, mpga, m4a, ogg, oga, opus, wav, webm, aac, aiff, mkv, mov, avi"
MIN_SAMPLE_RATE = 1000  # a header of 1 Hz would turn one byte into 16,000 samples
MIN_AUDIO_S = 0.1
TOO_MANY_FILES = (
    f"The server has too many files open: its limit (ulimit -n) is small for {naming('max_connections')}."
)


def invalid_audio(reason: str) -> InvalidAudio:
    return InvalidAudio(f"{reason} Supported formats: {RECORDING_FORMATS}.")


@dataclass(frozen=True)
class AudioLimits:
    max_audio_s: float = Settings.max_audio_s
    max_decoded_bytes: int = 1 << 36  # 12 hours of four channels at 96 kHz
    max_sample_rate: int = 384_000  # the highest in use
    max_channels: int = 32
    max_preprocess_s: float = 600.0  # of a processor: many times what 12 hours of any format take
    chunk_s: float = AudioWindow().duration_s

    @classmethod
    def from_settings(cls, settings: Settings, window: AudioWindow) -> Self:
        return cls(settings.max_audio_s, chunk_s=window.chunk_s)

    @property
    def chunk_samples(self) -> int:
        return int(self.chunk_s * SAMPLE_RATE)

    def check_layout(self, sample_rate: int, num_channels: int) -> None:
        if sample_rate < MIN_SAMPLE_RATE or num_channels < 1:
            raise invalid_audio(f"The file claims {num_channels} channels at {sample_rate} Hz.")
        if sample_rate > self.max_sample_rate:
            limit = f"{self.max_sample_rate} Hz"
            raise _over(f"sample rate of {sample_rate} Hz", limit, SampleRateTooHigh)
        if num_channels > self.max_channels:
            raise _over(f"number of channels, {num_channels},", f"{self.max_channels}", TooManyChannels)

    def check_decoded(self, num_bytes: int, duration_s: float) -> None:
        """Raises AudioTooLong for the samples decoded so far: headers lie."""
        if num_bytes > self.max_decoded_bytes:
            raise _over("decoded size", f"{self.max_decoded_bytes} bytes")
        if duration_s > self.max_audio_s:
            raise _over("duration", f"{self.max_audio_s:g} s, set by {naming('max_audio_s')}")

    def check_work(self, work_s: float) -> None:
        if work_s > self.max_preprocess_s:
            raise _over("decoding time", f"{self.max_preprocess_s:g} s")


def _over(what: str, limit: str, kind: type[AudioTooLong] = AudioTooLong) -> AudioTooLong:
    return kind(f"The file's {what} is over the limit of {limit}.")


# -- Tracks --------------------------------------------------------------------------------------------------

MAX_TRACK = 999


class TrackChoice(msgspec.Struct, frozen=True):
    """The requested tracks; empty uses the file's default."""

    numbers: tuple[int, ...] = ()
    language: str = ""


DEFAULT_TRACK = TrackChoice()


def parse_choice(text: str, split_channels: bool) -> TrackChoice:
    """Read a number, a language code or, for split channels, two numbers (`1,2`). Raises InvalidValue."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        return DEFAULT_TRACK
    if all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= MAX_TRACK for part in parts):
        numbers = tuple(int(part) for part in parts)
        if len(numbers) == 1 or (split_channels and len(numbers) == 2 and numbers[0] != numbers[1]):
            return TrackChoice(numbers)
        raise InvalidValue(
            "'track' takes one number; with channels=split it can be two different ones.", "track"
        )
    if len(parts) > 1 or not parts[0][0].isalpha():
        raise InvalidValue(
            f"'track' is a number from 1 to {MAX_TRACK} or the code of a language, such as 2 or eng.", "track"
        )
    return TrackChoice(language=parts[0])


def ranked(tracks: Sequence[Track], choice: TrackChoice) -> list[Track]:
    """Return the tracks to try, the best first. Raises NoSuchTrack."""
    if choice.numbers:
        if max(choice.numbers) > len(tracks):
            raise NoSuchTrack(f"'track' asks for number {max(choice.numbers)}; {_described(tracks)}.")
        return [tracks[number - 1] for number in choice.numbers]
    wanted = whisper_code(choice.language)
    suitable = [track for track in tracks if not wanted or whisper_code(track.language or "") == wanted]
    if not suitable:
        raise NoSuchTrack(f"'track' asks for the language '{choice.language[:20]}'; {_described(tracks)}.")
    return sorted(suitable, key=lambda track: (not track.is_default, track.is_extra))


def _described(tracks: Sequence[Track]) -> str:
    plural = "" if len(tracks) == 1 else "s"
    languages = ", ".join(f"{track.number}: {track.language or 'no language'}" for track in tracks[:20])
    return f"the file has {len(tracks)} audio track{plural} ({languages})"


# -- Decoders ------------------------------------------------------------------------------------------------

Block = npt.NDArray[np.float32]  # [frames, channels] at the file's own rate, full scale is 1.0


class DecodeTask(msgspec.Struct, frozen=True):
    """One file to decode, and how."""

    limits: AudioLimits = AudioLimits()
    split_channels: bool = False
    choice: TrackChoice = DEFAULT_TRACK
    channel: int | None = None  # alone; None: all


class FileInfo(msgspec.Struct, frozen=True):
    duration_s: float | None = None  # by the file's header
    num_channels: int = 1
    tracks_read: tuple[Track, ...] = ()
    truncated: bool = False  # known at the end


class Decoder(Protocol):
    sample_rate: int
    num_channels: int
    duration_s: float | None  # what the file's header says, which need not be so; None: nothing
    layout: tuple[str, ...]  # FFmpeg's names of the channels; empty: unknown
    tracks_read: tuple[Track, ...]  # of a file that has several
    is_float: bool  # the file's own numbers are floats: there may be NaN and infinity among them
    truncated: bool  # known at the end: the file promised more than it held, or was damaged on the way

    def read(self) -> Block:
        """Return the next block, a few seconds at most; an empty one is the end. Memory is reused.

        Raises InvalidAudio: nothing could be read.
        """

    def close(self) -> None: ...


class CannotOpen(Exception):
    pass


def id3_size(data: bytes) -> int:
    """Return the length of the ID3 tag at the start of `data`, 0 without one (ID3v2.4, 3.1)."""
    if not data.startswith(b"ID3") or len(data) < 10:
        return 0
    size = sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))
    return 10 + size + (10 if data[5] & 0x10 else 0)
