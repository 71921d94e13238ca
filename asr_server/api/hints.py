"""Suggest what a client meant that sends a field or a path of another API."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

MAX_QUOTED: Final = 80  # characters of what the client sent that an error repeats

_TRANSLATION: Final = "translations have a route of their own, /v1/audio/translations"
_WORD_TIMES: Final = "send response_format=verbose_json and timestamp_granularities[]=word"
_SEARCH: Final = "the server chooses the search"
_RECORDING: Final = "send the recording itself in 'file'"
FOREIGN_FIELDS: Final = {
    "task": _TRANSLATION,
    "translate": _TRANSLATION,
    "word_timestamps": _WORD_TIMES,
    "beam_size": _SEARCH,
    "best_of": _SEARCH,
    "url": _RECORDING,
    "audio_url": _RECORDING,
    "initial_prompt": "it is 'prompt' here",
    "output_format": "it is 'response_format' here",
    "speaker_labels": "it is 'diarize' here",
}


def unknown_field(name: str, known: Collection[str]) -> str:
    message = f"Unknown field '{name[:MAX_QUOTED]}'"
    if hint := FOREIGN_FIELDS.get(name):
        return f"{message}: {hint}."
    if nearest := difflib.get_close_matches(name[:MAX_QUOTED], known, n=1):
        return f"{message}. Did you mean '{nearest[0]}'?"
    return f"{message}. /docs lists the fields."


_ROUTES: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/models", "/v1/realtime")


def unknown_path(path: str) -> str:
    """Explain a path without /v1, with a part twice, or of a route that is OpenAI's alone."""
    for route in _ROUTES:
        if route.removeprefix("/v1") in path:
            return (
                f"There is no {path[:MAX_QUOTED]} here: it is {route}. A client's base URL ends in /v1, "
                "with nothing behind it."
            )
    return (
        f"There is no {path[:MAX_QUOTED]} here. This server turns speech into text and has no other route of "
        "OpenAI's; /docs lists its own."
    )
