"""Read `--clip START-END`: parts of a recording, in seconds or h:mm:ss."""

from __future__ import annotations

import math
import re
from typing import Final

import click

from asr_server.core import Clip
from asr_server.levels import Stretch, joined

_TIME: Final = r"(?:(?:(\d+):)?(\d+):)?(\d+(?:\.\d+)?)"
_CLIP: Final = re.compile(rf"{_TIME}-(?:{_TIME})?")


def parse_clips(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Clip, ...]:
    try:
        clips = [_clip(text.strip()) for value in values for text in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return tuple(Clip(*stretch) for stretch in joined(clips))


def _clip(text: str) -> Stretch:
    match = _CLIP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no START-END, such as 90-120, 1:30-2:00 or 1:02:30- for the rest.")
    start, end = match.groups()[:3], match.groups()[3:]
    start_s, end_s = _seconds(*start), math.inf if end[2] is None else _seconds(*end)
    if end_s <= start_s:
        raise ValueError(f"{text!r} ends before it begins.")
    return start_s, end_s


def _seconds(hours: str | None, minutes: str | None, seconds: str) -> float:
    return 3600 * int(hours or 0) + 60 * int(minutes or 0) + float(seconds)
