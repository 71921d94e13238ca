"""Read a checkpoint's small files: its JSON and the encoder's audio window.

A checkpoint's author is not trusted: files must be regular and bounded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE
from asr_server.errors import CheckpointError

# The largest, tokenizer.json, has 4 MB at most. Parsed, JSON takes up to 25 times its bytes.
MAX_SMALL_BYTES: Final = 6 << 20


@contextmanager
def reading(path: Path, *damaged: type[Exception]) -> Iterator[None]:
    """Raise CheckpointError, with the file's name, for OSError and `damaged`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except damaged as error:
        raise CheckpointError(f"{path} is cut short or damaged: fetch it again") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file. A pipe or device, which could be endless, raises CheckpointError."""
    with reading(path), open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def begins_with(path: Path, *beginnings: bytes) -> bool:
    with opened(path) as file:
        return file.read(max(map(len, beginnings))).startswith(beginnings)


def read_small(path: Path) -> bytes:
    """Read the file. Raises CheckpointError if it is unreadable or larger than any of Whisper's."""
    with opened(path) as file:
        content = file.read(MAX_SMALL_BYTES + 1)
    if len(content) > MAX_SMALL_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_SMALL_BYTES} bytes")
    return content


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_small(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not what it should be (a JSON object): fetch it again")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


# How preprocessor_config.json describes the log-mel frames of every Whisper model.
FEATURES: Final = {"sampling_rate": SAMPLE_RATE, "n_fft": 400, "hop_length": 160}
# Lengths below a whole window in which chunks are encoded, in positions: every half second up to 6 s, then
# every two, and beyond 20 s, where attention costs the most, every second. For each length that occurs oneDNN
# compiles kernels and keeps them: 4 MB for whisper-base.
SHORT_LENGTHS: Final = (*range(25, 300, 25), *range(300, 1000, 100), *range(1000, 1500, 50))
# Of silence that are always encoded after a chunk, where its window has them: 1.5 s. Of half a second too
# little hears that somebody has spoken: whisper-base then says the last sentence of several twice.
MARGIN_POSITIONS: Final = 75


_MAX_CHUNK_S: Final = 3600.0  # the window bounds it further


def _short(value: object) -> str:
    return repr(value)[:80]


def short_audio_mode(setting: str, dtype: str) -> str:
    """Resolve auto: exact for float32, so that its text equals the reference."""
    if setting != "auto":
        return setting
    return "exact" if dtype == "float32" else "tail"


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

    def for_short_audio(self, mode: str, lengths: tuple[int, ...] = SHORT_LENGTHS) -> AudioWindow:
        """Return the window that encodes chunks in the shortest of `lengths` (`tail`)."""
        if mode == "exact":
            return self
        return replace(self, short_lengths=tuple(n for n in lengths if n < self.num_positions))

    def positions_for(self, num_samples: int) -> int:
        least = -(-num_samples * POSITIONS_PER_S // SAMPLE_RATE) + MARGIN_POSITIONS
        return next((length for length in self.short_lengths if length >= least), self.num_positions)

    @classmethod
    def from_directory(cls, directory: Path) -> AudioWindow:
        """Read `max_source_positions`, and two keys of ours in preprocessor_config.json.

        `max_chunk_s` is for checkpoints that err less in shorter chunks; `padding` ("zeros") pads as
        openai-whisper. Raises CheckpointError for contradictions, and features that Whisper lacks.
        """
        config = read_json(directory / "config.json")
        path = directory / "preprocessor_config.json"
        preprocessor = read_optional_json(path)
        num_positions = config.get("max_source_positions", cls.num_positions)
        max_chunk_s = preprocessor.get("max_chunk_s", cls.max_chunk_s)
        if type(num_positions) is not int or num_positions < 1:
            raise CheckpointError(
                f"max_source_positions in {directory / 'config.json'} is {_short(num_positions)}: "
                "must be a whole number from 1 on"
            )
        if type(max_chunk_s) not in (int, float) or not 0 <= max_chunk_s <= _MAX_CHUNK_S:
            raise CheckpointError(
                f"max_chunk_s in {path} is {_short(max_chunk_s)}: must be from 0 to {_MAX_CHUNK_S:g}"
            )
        window = cls(num_positions, float(max_chunk_s), padding=str(preprocessor.get("padding", cls.padding)))
        if window.padding not in ("silence", "zeros"):
            raise CheckpointError(f"padding in {path} is {_short(window.padding)}: silence or zeros")
        expected = {**FEATURES, "chunk_length": window.duration_s}
        for key, value in expected.items():
            if preprocessor.get(key, value) != value:
                raise CheckpointError(
                    f"{key} in {path} is {_short(preprocessor[key])}; its encoder needs {value:g}"
                )
        return window


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
STORED = "stored_tensors.json"  # this server's own: where tensors lie in another program's file
CTRANSLATE2 = "model.bin"

# Of every published model's tokenizer.
ENGLISH_VOCABULARY, MULTILINGUAL_VOCABULARY, CANTONESE_VOCABULARY = 51864, 51865, 51866  # entries
PUBLISHED_VOCABULARIES: Final = (ENGLISH_VOCABULARY, MULTILINGUAL_VOCABULARY, CANTONESE_VOCABULARY)
LANGUAGE_TOKEN: Final = re.compile(r"<\|[a-z]{2,3}\|>")
