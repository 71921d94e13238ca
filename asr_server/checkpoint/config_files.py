"""Reads the JSON files of a checkpoint, and from them how much audio its encoder takes at once.

Used by every process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE
from asr_server.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where there is no such file, or no JSON object in it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """The same, but empty where there is no such file."""
    return read_json(path) if path.exists() else {}


# How preprocessor_config.json describes the log-mel frames of every Whisper model.
FEATURES: Final = {"sampling_rate": SAMPLE_RATE, "n_fft": 400, "hop_length": 160}
# Few, because a GPU records the encoder anew for each.
SHORT_AUDIO_S: Final = (5, 10, 15, 20)


@dataclass(frozen=True)
class AudioWindow:
    """How much audio the checkpoint's encoder takes at once, and how much of it one chunk should fill."""

    num_positions: int = 1500  # of the encoder
    max_chunk_s: float = 0.0  # what the checkpoint itself asks for; 0: nothing, its chunks fill the window
    short_lengths: tuple[int, ...] = ()  # fewer positions to which the encoder may be limited, rising
    short_audio: str = "exact"  # what the checkpoint asks for where the settings leave it to that
    padding: str = "silence"  # what follows a chunk in its window: silence, or zeros in the spectrogram

    @property
    def num_samples(self) -> int:
        return self.num_positions * SAMPLE_RATE // POSITIONS_PER_S

    @property
    def duration_s(self) -> float:
        return self.num_positions / POSITIONS_PER_S

    def chunk_s(self, max_chunk_s: float) -> float:
        """The longest chunk to cut. 0 leaves it to the checkpoint; the window bounds it either way."""
        return min(max_chunk_s or self.max_chunk_s or self.duration_s, self.duration_s)

    def mode_for_short_audio(self, mode: str) -> str:
        """`auto` leaves it to the checkpoint."""
        return self.short_audio if mode == "auto" else mode

    def for_short_audio(self, mode: str) -> AudioWindow:
        """The same window; `fast`: chunks that do not fill it are encoded in fewer positions."""
        if self.mode_for_short_audio(mode) != "fast":
            return self
        lengths = [seconds * POSITIONS_PER_S for seconds in SHORT_AUDIO_S]
        return replace(self, short_lengths=tuple(each for each in lengths if each < self.num_positions))

    def positions_for(self, num_samples: int) -> int:
        """Of the encoder, in which a chunk of so many samples is encoded."""
        least = -(-num_samples * POSITIONS_PER_S // SAMPLE_RATE)
        return next((length for length in self.short_lengths if length >= least), self.num_positions)

    @classmethod
    def from_directory(cls, directory: Path) -> AudioWindow:
        """Reads config.json's `max_source_positions` and, where there is a preprocessor_config.json, three
        keys of this server's own: `max_chunk_s`, for a checkpoint that hears better in shorter chunks,
        `short_audio` ("fast"), for one that hears as well without what follows a chunk in its window, and
        `padding` ("zeros"), for one that is to be read as openai-whisper reads it, to the digit.

        Raises:
            CheckpointError: the two files contradict each other, or ask for other features than Whisper's.
        """
        config = read_json(directory / "config.json")
        path = directory / "preprocessor_config.json"
        preprocessor = read_optional_json(path)
        window = cls(
            int(config.get("max_source_positions", cls.num_positions)),
            float(preprocessor.get("max_chunk_s", cls.max_chunk_s)),
            short_audio=str(preprocessor.get("short_audio", cls.short_audio)),
            padding=str(preprocessor.get("padding", cls.padding)),
        )
        if window.short_audio not in ("exact", "fast"):
            raise CheckpointError(f"short_audio in {path} is {window.short_audio!r}: exact or fast")
        if window.padding not in ("silence", "zeros"):
            raise CheckpointError(f"padding in {path} is {window.padding!r}: silence or zeros")
        expected = {**FEATURES, "chunk_length": window.duration_s}
        for key, value in expected.items():
            if preprocessor.get(key, value) != value:
                raise CheckpointError(
                    f"{key} in {path} is {preprocessor[key]!r}; its encoder needs {value:g}"
                )
        return window
