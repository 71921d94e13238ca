"""Holds what one call of `asr-server transcribe` was asked to do. Made by `cli/transcribe.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asr_server.core import Task
from asr_server.formats import PLAIN_LAYOUT, RenderOptions, ResponseFormat, SubtitleLayout

Existing = Literal["refuse", "skip", "overwrite"]  # what happens to a file whose result is there already


@dataclass(frozen=True)
class TranscribeJob:
    arguments: tuple[str, ...]  # files, folders, "-" for standard input
    formats: tuple[ResponseFormat, ...] = ("text",)
    output_dir: Path | None = None  # None: standard output
    existing: Existing = "refuse"
    recursive: bool = False
    quiet: bool = False
    language: str | None = None  # as the user wrote it; None: detected
    task: Task = "transcribe"
    prompt: str = ""
    temperature: float = 0.0  # 0: from 0 up, as far as it takes
    word_timestamps: bool = False
    condition_on_previous_text: bool = False
    multilingual: bool = False
    layout: SubtitleLayout = PLAIN_LAYOUT
    speakers: tuple[str, ...] = ()  # of each channel; empty: the channels are mixed
    manifest: Path | None = None  # instead of arguments: JSON lines, each of which names a recording

    @property
    def needs_words(self) -> bool:
        return self.word_timestamps or self.layout.needs_words

    @property
    def render_options(self) -> RenderOptions:
        return RenderOptions(with_words=self.word_timestamps, layout=self.layout)

    @property
    def has_several_inputs(self) -> bool:
        """By what was written, not by what was found, so that a script's output keeps its shape."""
        return len(self.arguments) > 1 or Path(self.arguments[0]).is_dir()
