"""What schemathesis sends as files, and what it holds events to. Loaded by its command."""

from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st

from tests.support.fake_replica import noise, wav

RECORDINGS = [wav(noise(1.0)), wav(np.zeros(16_000, np.float32)), wav(noise(0.05)), b"", b"RIFF"]
EVENTS = ("TextDelta", "TextDone", "DiarizedSegment", "ErrorBody")

schemathesis.openapi.format("binary", st.sampled_from(RECORDINGS) | st.binary(max_size=200))


def before_load_schema(_context: schemathesis.HookContext, document: dict[str, Any]) -> None:
    """The document describes a stream as the text that it is; schemathesis wants an event's fields there."""
    event = {
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in EVENTS]},
    }
    data = {"if": {"const": "[DONE]"}, "else": event}
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        content["text/event-stream"]["schema"] = {
            "type": "object",
            "required": ["data"],
            "properties": {"data": data},
        }


schemathesis.hook(before_load_schema)
