"""Write docs/settings.md from the settings themselves: python -m tools.make_settings_page"""

import re
import typing
from pathlib import Path
from typing import Any

from asr_server.config import MIB, NO_PORT, flag_name
from asr_server.server.settings import FIELDS, SECTIONS, ServerSettings, environment_names

GIB = 1 << 30
PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Every setting is a flag of `asr-server serve` and a variable; a flag wins.
[Operations](operations.md) says how they are read, and [limits](limits.md) what they bound.
"""


def page() -> str:
    tables = (
        f"\n## {section}\n\n| flag, variable | default | what |\n| --- | --- | --- |\n"
        + "".join(f"{row(setting)}\n" for setting in names)
        for section, names in SECTIONS.items()
    )
    return HEAD + "".join(tables)


def row(setting: str) -> str:
    names = "<br>".join(f"`{name}`" for name in (flag_name(setting), *environment_names(setting)))
    text = (FIELDS[setting].description or "").replace("|", "\\|")
    text = re.sub(r"(?<!`)(--[a-z][a-z-]+( (?!too\b)[a-z]\w*)?)", r"`\1`", text)
    if not re.match(r"\w+( \([^)]*\))?:", text):  # a value that is explained keeps its case
        text = text[:1].upper() + text[1:]
    return f"| {names} | {default(setting)} | {text}{choices(setting)} |"


def default(setting: str) -> str:
    value: Any = FIELDS[setting].default
    if setting == "preprocess_workers":
        return "by the cores"  # of the machine that this runs on
    if value in ("", NO_PORT):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if setting.endswith("_bytes") and value and value % MIB == 0:
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`".replace(",", ", ")


def choices(setting: str) -> str:
    hints = typing.get_type_hints(ServerSettings)
    words = [str(word) for word in typing.get_args(hints[setting])]
    return f". One of {', '.join(f'`{word}`' for word in words)}" if words else ""


if __name__ == "__main__":
    PAGE.write_text(page())
