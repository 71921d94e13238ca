"""Write docs/settings.md from the settings themselves: python -m tools.make_settings_page"""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

from asr_server.config import FIELDS, MIB, NO_PORT, Settings, environment_names, flag_name

GIB = 1 << 30
PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
# In a newcomer's order; a setting is in the first section whose pattern matches its whole name.
SECTIONS = {
    "To begin with": r"model|host|port|device|dtype|api_key|keys_file|log_level",
    "Models": r"models|load|idle_unload_s|max_load_wait_s|served_model_name|model_alias",
    "Text": r"beam_size|max_fallbacks|check_voice|short_audio|max_chunk_s",
    "Uploads and recordings": r"max_(upload|audio|decoded|sample|channels|preprocess|stall).*|preprocess_.*",
    "Live audio": r".*realtime.*|wyoming.*",
    "HTTP and clients": (
        r"max_c.*|max_header.*|header_.*|min_client.*|client_.*|keep_alive_s|root_path|ssl_.*|cors_.*"
        r"|allowed_hosts|unknown_fields|reuse_port"
    ),
    "Operation": r"drain_s|log_.*|metrics_.*|usage_log",
    "Engine": r".*",
}
HEAD = """# Settings

Every setting is a flag of `asr-server serve` and a variable; a flag wins.
[Operations](operations.md) says how they are read, and [limits](limits.md) what they bound.
`python -m tools.make_settings_page` writes this page from the code.
"""


def page() -> str:
    sections: dict[str, list[str]] = {name: [] for name in SECTIONS}
    for setting in FIELDS:
        section = next(name for name, pattern in SECTIONS.items() if re.fullmatch(pattern, setting))
        sections[section].append(row(setting))
    tables = (
        f"\n## {name}\n\n| flag, variable | default | what |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
        for name, rows in sections.items()
        if rows
    )
    return HEAD + "".join(tables)


def row(setting: str) -> str:
    names = "<br>".join(f"`{name}`" for name in (flag_name(setting), *environment_names(setting)))
    text = (FIELDS[setting].description or "").replace("|", "\\|")
    text = re.sub(r"(?<!`)(--[a-z][a-z-]+( [a-z]\w*)?)", r"`\1`", text)
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
    hints = typing.get_type_hints(Settings)
    words = [str(word) for word in typing.get_args(hints[setting])]
    return f". One of {', '.join(f'`{word}`' for word in words)}" if words else ""


if __name__ == "__main__":
    PAGE.write_text(page())
