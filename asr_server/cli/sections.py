"""Lists a command's options in sections, so that what a person needs comes before what only tuning needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import click


class SectionedCommand(click.Command):
    """A command whose options are listed under headings; those of no section come first."""

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **attributes: Any) -> None:
        """`sections`: heading to the names of its parameters."""
        super().__init__(*args, **attributes)
        self._heading_of = {name: heading for heading, names in sections.items() for name in names}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                listed.setdefault(self._heading_of.get(parameter.name or "", "Options"), []).append(record)
        for heading, records in listed.items():
            with formatter.section(heading):
                formatter.write_dl(records)
