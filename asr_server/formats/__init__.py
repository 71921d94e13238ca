"""Transcripts in OpenAI's response formats, for the HTTP API and for the command line."""

from asr_server.formats.cues import SubtitleLayout
from asr_server.formats.render import (
    DEFAULTS,
    RenderOptions,
    ResponseFormat,
    json_body,
    logprobs_body,
    render,
    verbose_body,
)

__all__ = [
    "DEFAULTS",
    "RenderOptions",
    "ResponseFormat",
    "SubtitleLayout",
    "json_body",
    "logprobs_body",
    "render",
    "verbose_body",
]
