"""Limit one recording; an error about a limit names it and its setting."""

from __future__ import annotations

from dataclasses import dataclass

from asr_server.checkpoint.files import AudioWindow
from asr_server.config import Settings, naming, values_for
from asr_server.core import SAMPLE_RATE
from asr_server.errors import AudioTooLong, InvalidAudio, SampleRateTooHigh, TooManyChannels

FORMATS = "flac, mp3, mp4, mpeg, mpga, m4a, ogg, oga, opus, wav, webm, aac, aiff, mkv, mov, avi"
MIN_SAMPLE_RATE = 1000  # a header of 1 Hz would turn one byte into 16,000 samples
MIN_AUDIO_S = 0.1
TOO_MANY_FILES = (
    f"The server has too many files open: its limit (ulimit -n) is small for {naming('max_connections')}."
)


def invalid_audio(reason: str) -> InvalidAudio:
    return InvalidAudio(f"{reason} Supported formats: {FORMATS}.")


@dataclass(frozen=True)
class AudioLimits:
    max_audio_s: float = Settings.max_audio_s
    max_decoded_bytes: int = Settings.max_decoded_bytes
    max_sample_rate: int = Settings.max_sample_rate
    max_channels: int = Settings.max_channels
    max_preprocess_s: float = Settings.max_preprocess_s
    chunk_s: float = AudioWindow().duration_s

    @classmethod
    def from_settings(cls, settings: Settings, window: AudioWindow) -> AudioLimits:
        return cls(**values_for(cls, settings), chunk_s=window.chunk_s(settings.max_chunk_s))

    @property
    def chunk_samples(self) -> int:
        return int(self.chunk_s * SAMPLE_RATE)

    def check_layout(self, sample_rate: int, num_channels: int) -> None:
        if sample_rate < MIN_SAMPLE_RATE or num_channels < 1:
            raise invalid_audio(f"The file claims {num_channels} channels at {sample_rate} Hz.")
        if sample_rate > self.max_sample_rate:
            limit = f"{self.max_sample_rate} Hz"
            raise _over(f"sample rate of {sample_rate} Hz", limit, "max_sample_rate", SampleRateTooHigh)
        if num_channels > self.max_channels:
            what = f"number of channels, {num_channels},"
            raise _over(what, f"{self.max_channels}", "max_channels", TooManyChannels)

    def check_decoded(self, num_bytes: int, duration_s: float) -> None:
        """Raises AudioTooLong for the samples decoded so far: headers lie."""
        if num_bytes > self.max_decoded_bytes:
            raise _over("decoded size", f"{self.max_decoded_bytes} bytes", "max_decoded_bytes")
        if duration_s > self.max_audio_s:
            raise _over("duration", f"{self.max_audio_s:g} s", "max_audio_s")

    def check_work(self, work_s: float) -> None:
        if work_s > self.max_preprocess_s:
            raise _over("decoding time", f"{self.max_preprocess_s:g} s", "max_preprocess_s")


def _over(what: str, limit: str, setting: str, kind: type[AudioTooLong] = AudioTooLong) -> AudioTooLong:
    return kind(f"The file's {what} is over the limit of {limit}, set by {naming(setting)}.")
