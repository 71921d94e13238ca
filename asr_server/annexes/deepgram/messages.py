"""What `/v1/listen` answers, whole and live. Types and their making; knows no connection."""

import unicodedata
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, NamedTuple

from asr_server import __version__
from asr_server.api.models import ServedModel

Json = dict[str, Any]


class Spoken(NamedTuple):
    """A word; times are seconds from the start of the audio."""

    text: str
    start_s: float
    end_s: float
    confidence: float
    speaker: int | None = None


def word_of(spoken: Spoken) -> Json:
    """Return it as written and as spoken: small, without the signs around it."""
    letters = spoken.text.casefold()
    first = next((at for at, letter in enumerate(letters) if _is_spoken(letter)), 0)
    last = next((at for at in range(len(letters), 0, -1) if _is_spoken(letters[at - 1])), len(letters))
    times = {"start": round(spoken.start_s, 3), "end": round(spoken.end_s, 3)}
    word = {"word": letters[first:last], **times, "confidence": spoken.confidence}
    if spoken.speaker is not None:
        word["speaker"] = spoken.speaker
    return word | {"punctuated_word": spoken.text}


def _is_spoken(letter: str) -> bool:
    return not unicodedata.category(letter).startswith("P")


def alternative(text: str, words: Sequence[Spoken]) -> Json:
    return {"transcript": text.strip(), "confidence": confidence_of(words), "words": [*map(word_of, words)]}


def confidence_of(words: Iterable[Spoken]) -> float:
    return round(fmean([word.confidence for word in words] or [0.0]), 4)


def model_facts(model: ServedModel) -> tuple[str, Json]:
    """Return the model's identifier, and what Deepgram tells of a model."""
    facts = {"name": model.name, "version": __version__, "arch": "whisper"}
    return str(uuid.uuid5(uuid.NAMESPACE_URL, model.name)), facts


def metadata(model: ServedModel, request_id: str, sha256: str, duration_s: float, channels: int) -> Json:
    model_uuid, facts = model_facts(model)
    return {
        "transaction_key": "deprecated",
        "request_id": request_id,
        "sha256": sha256,
        "created": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "duration": round(duration_s, 3),
        "channels": channels,
        "models": [model_uuid],
        "model_info": {model_uuid: facts},
    }


def error_body(code: str, message: str, request_id: str) -> Json:
    return {"err_code": code, "err_msg": message, "request_id": request_id}
