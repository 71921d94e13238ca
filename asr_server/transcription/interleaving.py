"""Puts the segments of a file's channels in the order they begin in. Used by `transcript_builder.py`."""

from __future__ import annotations

from asr_server.core import Segment


class Interleaver:
    """Holds segments back until all that begin before them are there: a window or two of each channel."""

    def __init__(self) -> None:
        self._held: list[Segment] = []

    def add(self, segments: list[Segment]) -> None:
        self._held += segments

    def take(self, settled_s: float) -> list[Segment]:
        """Those that begin before `settled_s`, in order. No segment added later may begin before it."""
        self._held.sort(key=lambda segment: segment.start_s)
        num_settled = sum(segment.start_s < settled_s for segment in self._held)
        taken, self._held = self._held[:num_settled], self._held[num_settled:]
        return taken
