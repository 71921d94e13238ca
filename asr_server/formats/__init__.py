"""Transcripts in OpenAI's response formats, for the HTTP API and for the command line."""

from asr_server.formats.render import (
    DEFAULTS,
    PLAIN_LAYOUT,
    RenderOptions,
    ResponseFormat,
    SubtitleLayout,
    diarized_segment,
    languages_body,
    logprobs_body,
    render,
    verbose_body,
)

__all__ = [
    "DEFAULTS",
    "PLAIN_LAYOUT",
    "RenderOptions",
    "ResponseFormat",
    "SubtitleLayout",
    "diarized_segment",
    "languages_body",
    "logprobs_body",
    "render",
    "verbose_body",
]
