"""Read what `transcribe` is given: whisper's spellings of options, and parts of a recording."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Final

import click

from asr_server.cli.options import SectionedCommand
from asr_server.core import Clip
from asr_server.levels import Stretch, joined

END_OF_OPTIONS: Final = "--"
OTHER_NAMES: Final = {
    "--output-format": "--format",
    "--initial-prompt": "--prompt",
    "--threads": "--cpu-threads",
    "--compute-type": "--dtype",
}
# Options that take True or False there; the flag that each value means here, empty for none.
SAME_FLAGS: Final = (
    "--word-timestamps",
    "--highlight-words",
    "--condition-on-previous-text",
    "--multilingual",
)
SWITCHES: Final = {flag: {"True": flag, "False": ""} for flag in SAME_FLAGS} | {
    "--verbose": {"True": "", "False": "--quiet"},
    "--fp16": {"True": "", "False": ""},  # `--dtype` chooses what the processor has
    "--vad-filter": {"True": "", "False": ""},  # long silences are left out anyway
}
# Switches of other commands that go without a value: the arguments that they mean here.
OTHER_SWITCHES: Final = {"--diarize": ("--speakers", "auto"), "--vad-filter": ()}


class WhisperSpelledCommand(SectionedCommand):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, in_our_spelling(args))


def in_our_spelling(args: Sequence[str]) -> list[str]:
    end = args.index(END_OF_OPTIONS) if END_OF_OPTIONS in args else len(args)
    return [*_respelled(list(args[:end])), *args[end:]]


def _respelled(args: list[str]) -> Iterator[str]:
    while args:
        name, equals, value = args.pop(0).partition("=")
        if not name.startswith("--"):
            yield name + equals + value
            continue
        name = name.replace("_", "-")
        name = OTHER_NAMES.get(name, name)
        choices = SWITCHES.get(name, {})
        given = value if equals else args[0] if args else ""
        if given in choices:
            del args[: not equals]
            if choices[given]:
                yield choices[given]
        elif not equals and name in OTHER_SWITCHES:
            yield from OTHER_SWITCHES[name]
        else:
            yield name + equals + value


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
