"""A transcript as SubRip and WebVTT files."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from asr_server.core import Segment
from asr_server.formats.cues import PLAIN_LAYOUT, Cue, SubtitleLayout, cues


def srt(segments: Sequence[Segment], layout: SubtitleLayout = PLAIN_LAYOUT) -> str:
    """SubRip: numbered from 1, commas before the milliseconds, a blank line behind each. Empty for none."""
    return "".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{_labelled(cue)}\n\n"
        for number, cue in enumerate(cues(segments, layout), start=1)
    )


def vtt(segments: Sequence[Segment], layout: SubtitleLayout = PLAIN_LAYOUT) -> str:
    """WebVTT; its text is markup, so that `&`, `<` and `>` are escaped."""
    blocks = (
        f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_voiced(cue)}\n\n"
        for cue in cues(segments, layout)
    )
    return "WEBVTT\n\n" + "".join(blocks)


def _labelled(cue: Cue) -> str:
    text = _text(cue, str)
    return f"{cue.speaker}: {text}" if cue.speaker else text


def _voiced(cue: Cue) -> str:
    """With WebVTT's voice tag around what a speaker says."""
    text = _text(cue, _escape)
    return f"<v {_escape(cue.speaker)}>{text}</v>" if cue.speaker else text


def _text(cue: Cue, escape: Callable[[str], str]) -> str:
    """An arrow within the text would end the cue."""
    pieces = (f"<u>{escape(p.text)}</u>" if p.underlined else escape(p.text) for p in cue.pieces)
    return "".join(pieces).replace("-->", "->")


def _escape(text: str) -> str:
    return html.escape(text.replace("-->", "->"), quote=False)


def _clock(time_s: float, point: str) -> str:
    """`HH:MM:SS,mmm`; hours have more digits where they need them."""
    seconds, ms = divmod(round(time_s * 1000), 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{ms:03d}"
