"""The headers that answers carry: documented, and shown to pages of other origins.

`api.transcribe.answer_headers` and `recording_headers` set those of a transcript, `api.errors` an error's.
"""

from __future__ import annotations

from typing import Final

REQUEST_ID: Final = "x-request-id"
MODEL_LIMIT: Final = "x-model-limit"
IGNORED_FIELDS: Final = "x-ignored-fields"
TRUNCATED: Final = "x-truncated"
TRACKS: Final = "x-audio-tracks"
DROPPED: Final = "x-dropped-segments"
RETRY_AFTER: Final = "retry-after"
RETRY_AFTER_MS: Final = "retry-after-ms"
SHOULD_RETRY: Final = "x-should-retry"
LIMIT_UNITS: Final = ("requests", "audio-seconds")
LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in LIMIT_UNITS
)
HEADERS: Final = {
    REQUEST_ID: "The request's id: the one that was sent, or a new one. The server's log names it.",
    MODEL_LIMIT: "What the embedded model cannot do; absent with any other model.",
    IGNORED_FIELDS: "The fields that were left out, where the server ignores unknown ones.",
    TRUNCATED: "`true`: the recording is damaged or cut short. A stream says it in its last event.",
    TRACKS: "The numbers of the audio tracks that were read, of a file that has several; not with a stream.",
    DROPPED: "How many segments that the model wrote are left out; not with a stream.",
    RETRY_AFTER: "Seconds to wait before the next try.",
    RETRY_AFTER_MS: "The same in milliseconds.",
    "www-authenticate": "How to send a key.",
    SHOULD_RETRY: "`false`: another try would fail as well.",
    "connection": "`close`: this server is about to stop.",
    "x-accel-buffering": "With a stream `no`: a proxy is not to hold the events back.",
} | dict.fromkeys(LIMIT_HEADERS, "Of a key with a limit, as OpenAI has it.")
# Of replies that have no others: browsers guess no type, show them in no frame and run nothing in them.
SAFE_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}
