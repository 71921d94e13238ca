"""Numbers that pages state in prose are those of the constants that decide them, wherever these stand."""

from __future__ import annotations

import re
from functools import cache

import pytest

from asr_server.config import MIB
from tests.contract.test_documentation import ROOT

KIB, GIB, MS, MINUTE = 1 << 10, 1 << 30, 0.001, 60.0
NAMES = {"MIB": MIB}
# Page, what it says, the constant ("file:NAME" where a name occurs twice), and the unit of the page.
STATED: tuple[tuple[str, str, str, float], ...] = (
    ("api.md", "the last {} minutes of the server", "activity.py:WINDOW_S", MINUTE),
    ("api.md", "A value is at most {} KiB", "MAX_VALUE_BYTES", KIB),
    ("errors.md", "under {} s", "MIN_AUDIO_S", 1),
    ("keys.md", "Up to {} keys", "MAX_KEYS", 1),
    ("limits.md", "computes {} s on one block", "BLOCK_CPU_S", 1),
    ("limits.md", "more than {} GiB of memory", "MAX_DATA_BYTES", GIB),
    ("limits.md", "no processor for {} s", "BLOCK_WALL_S", 1),
    ("limits.md", "no answer for {} s", "MAX_SILENCE_MS", 1 / MS),
    ("monitoring.md", "at most {} request", "MAX_ANSWERS", 1),
    ("operations.md", "for more than {} seconds", "FROZEN_AFTER_S", 1),
    ("page.md", "{} GiB in the browser", "sounds.js:MOST_BYTES", GIB),
    ("page.md", "{} stay, or fewer", "store.js:MOST", 1),
    ("page.md", "{} million characters", "MOST_CHARACTERS", 1e6),
    ("realtime.md", "more than {} MiB ends the session", "MAX_MESSAGE_BYTES", MIB),
    ("realtime.md", "A commit of under {} ms", "MIN_COMMIT_MS", 1),
    ("realtime.md", "reads nothing for {} s", "MAX_SEND_S", 1),
)


@cache
def constants() -> dict[str, str]:
    """Return the expression of each constant, by its name and by file and name."""
    found: dict[str, str] = {}
    files = [path for pattern in ("*.py", "*.js") for path in (ROOT / "asr_server").rglob(pattern)]
    for path in files:
        line = r"^(?:export )?(?:const )?_?([A-Z][A-Z_0-9]+)(?:: [\w\[\]]+)? = ([^#;\n]+?)(?:;.*|\s*#.*)?$"
        for name, expression in re.findall(line, path.read_text("utf-8"), re.MULTILINE):
            found[name] = found[f"{path.name}:{name}"] = expression
    return found


@pytest.mark.parametrize(
    ("page", "text", "name", "unit"), STATED, ids=[f"{row[0]}-{row[2]}" for row in STATED]
)
def test_a_number_in_prose_is_that_of_its_constant(page: str, text: str, name: str, unit: float) -> None:
    value = float(eval(constants()[name], dict(NAMES))) / unit
    words = " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    assert text.format(f"{round(value, 1):g}") in words
