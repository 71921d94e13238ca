"""A transcript's segments as SubRip and WebVTT files."""

from __future__ import annotations

import html
from collections.abc import Sequence

from asr_server.core import Segment


def srt(segments: Sequence[Segment]) -> str:
    """SubRip: numbered from 1, commas before the milliseconds, a blank line behind each. Empty for none."""
    return "".join(
        f"{number}\n{_clock(s.start_s, ',')} --> {_clock(s.end_s, ',')}\n{_line(s.text)}\n\n"
        for number, s in enumerate(segments, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """WebVTT; its text is markup, so that `&`, `<` and `>` are escaped."""
    cues = (
        f"{_clock(s.start_s, '.')} --> {_clock(s.end_s, '.')}\n{html.escape(_line(s.text), quote=False)}\n\n"
        for s in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    """A blank line or an arrow within the text would end the cue."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(time_s: float, point: str) -> str:
    """`HH:MM:SS,mmm`; hours have more digits where they need them."""
    seconds, ms = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{ms:03d}"
