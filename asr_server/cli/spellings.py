"""Read whisper's command line as ours: underscores, True and False, other names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import click

from asr_server.cli.options import SectionedCommand

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
    """Replace whisper's spellings in the arguments."""
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
