"""Transcripts in OpenAI's response formats, for the HTTP API and for the command line."""

from asr_server.formats.render import ResponseFormat, json_body, logprobs_body, render, verbose_body

__all__ = ["ResponseFormat", "json_body", "logprobs_body", "render", "verbose_body"]
