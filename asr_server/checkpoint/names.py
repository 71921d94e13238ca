"""Maps the short names of the published Whisper models to their names on the Hugging Face hub, and back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Final

from asr_server.checkpoint.error import CheckpointError

_OPENAI = (
    *("tiny", "tiny.en", "base", "base.en", "small", "small.en", "medium", "medium.en"),
    *("large-v1", "large-v2", "large-v3", "large-v3-turbo"),
)
_DISTILLED = ("small.en", "medium.en", "large-v2", "large-v3", "large-v3.5")
SHORT_NAMES: Final[Mapping[str, str]] = {
    **{name: f"openai/whisper-{name}" for name in _OPENAI},
    "large-v1": "openai/whisper-large",
    "large": "openai/whisper-large-v3",  # as for openai-whisper
    "turbo": "openai/whisper-large-v3-turbo",
    **{f"distil-{name}": f"distil-whisper/distil-{name}" for name in _DISTILLED},
}
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def hub_name(name: str) -> str:
    """`large-v3` and `whisper-large-v3` are `openai/whisper-large-v3`; any other name stays as it is."""
    return SHORT_NAMES.get(name.removeprefix("whisper-"), name)


def check_hub_name(name: str) -> None:
    """Raises CheckpointError where nothing on the hub can have this name, without asking it."""
    if _ON_THE_HUB.fullmatch(hub_name(name)) and not name.startswith("."):
        return
    if "/" in name or name.startswith((".", "~")):
        raise CheckpointError(f"there is no directory {name}")
    likely = difflib.get_close_matches(name, SHORT_NAMES, n=1)
    raise CheckpointError(
        f"{name!r} is no directory here and no model's name"
        + (f"; did you mean {likely[0]}?" if likely else ".")
        + f" Known short names: {', '.join(SHORT_NAMES)}; any other model is ORGANISATION/NAME on the hub."
    )


def published_name(text: str) -> str | None:
    """The short name of the published model that a file or directory seems to be, by its name.

    `ggml-large-v3-q5_0.bin` is `large-v3`, `faster-distil-whisper-large-v3` is `distil-large-v3`.
    """
    plain = text.lower().replace("distil-whisper", "distil")
    for name in sorted(SHORT_NAMES, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9]|\.en)", plain):
            return name
    return None
