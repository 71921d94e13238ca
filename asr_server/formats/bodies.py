"""The JSON bodies of a transcript, field by field as OpenAI's audio API names them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class DurationUsage(BaseModel):
    type: Literal["duration"] = "duration"
    seconds: int


class TokensUsage(BaseModel):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Logprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class Language(BaseModel):
    code: str


class VerboseSegment(BaseModel):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    speaker: str | None = None  # ours, as in the words: where each channel is a speaker


class VerboseWord(BaseModel):
    word: str
    start: float
    end: float
    speaker: str | None = None


class DiarizedSegment(BaseModel):
    """In the body, and as an event of a stream."""

    type: Literal["transcript.text.segment"] = "transcript.text.segment"
    id: str
    start: float
    end: float
    speaker: str
    text: str


class Json(BaseModel):
    text: str
    languages: list[Language]
    logprobs: list[Logprob] | None = None
    usage: DurationUsage


class DiarizedJson(BaseModel):
    task: Literal["transcribe"] = "transcribe"
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: DurationUsage


class VerboseJson(BaseModel):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[VerboseSegment] | None = None
    words: list[VerboseWord] | None = None
    usage: DurationUsage
