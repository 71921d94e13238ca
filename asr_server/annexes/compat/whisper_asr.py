"""whisper-asr-webservice's `POST /asr` and `POST /detect-language`, as Bazarr and Lingarr call them.

Fields are in the query or the form, the recording in `audio_file`; `encode=false` means raw 16-bit samples
at 16 kHz.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
    read_fields,
)
from asr_server.api.state import get_state, require_key
from asr_server.api.transcribe import TranscriptionResponse, body_response, transcribing
from asr_server.api.upload import Form
from asr_server.audio.native import unsized_header
from asr_server.core import SAMPLE_RATE, Clip, Segment, Transcript
from asr_server.errors import InvalidValue
from asr_server.formats.render import word_body
from asr_server.formats.subtitles import tsv
from asr_server.transcription.language import name_of

router = APIRouter(dependencies=[Depends(require_key)], include_in_schema=False)

FILE_NAME: Final = "audio_file"
_FORMATS: Final = {"txt": "text", "vtt": "vtt", "srt": "srt", "tsv": "verbose_json", "json": "verbose_json"}
PCM_HEAD: Final = unsized_header(SAMPLE_RATE, num_channels=1, sample_bytes=2)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    encode: bool = True
    video_file: str = ""


class AsrFields(_File):
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str = ""
    initial_prompt: str = ""
    vad_filter: bool = False
    word_timestamps: bool = False
    output: Literal["txt", "vtt", "srt", "tsv", "json"] = "txt"
    diarize: bool = False
    min_speakers: int | None = Field(None, ge=1, le=32)
    max_speakers: int | None = Field(None, ge=1, le=32)


class DetectionFields(_File):
    detect_lang_offset: float = Field(0, ge=0)
    detect_lang_length: float | None = Field(None, gt=0)


WITHOUT_EFFECT: Final = ("video_file", "vad_filter")


@router.post("/asr", response_model=None)
async def asr(request: Request) -> Response:
    own = _Asr(request.query_params.multi_items())
    head = _head(own.query, AsrFields)
    return TranscriptionResponse(get_state(request), own.parse, own.reply, FILE_NAME, head)


@router.post("/detect-language", response_model=None)
async def detect_language(request: Request) -> Response:
    query = request.query_params.multi_items()
    head = _head(query, DetectionFields)
    return _Detection(get_state(request), partial(_parse_detection, query), None, FILE_NAME, head)


def _head(query: list[tuple[str, str]], fields_type: type[_File]) -> bytes:
    return b"" if read_fields(query, fields_type).encode else PCM_HEAD


class _Detection(TranscriptionResponse):
    async def _whole(self, form: Form, request: TranscriptionRequest, receive: Receive) -> Response:
        async with transcribing(self._state, form, request, receive) as session:
            async for delta in session:
                if delta.text and delta.language:
                    probability = session.language_probability
                    return _detected(delta.language, 1.0 if probability is None else probability)
        return _detected("", 0.0)


def _detected(code: str, confidence: float) -> JSONResponse:
    name = name_of(code) if code else "unknown"
    return JSONResponse({"detected_language": name, "language_code": code, "confidence": confidence})


def _parse_detection(
    query: list[tuple[str, str]], pairs: list[tuple[str, str]], models: Models
) -> TranscriptionRequest:
    fields = read_fields([*query, *pairs], DetectionFields)
    start_s = fields.detect_lang_offset
    end_s = start_s + (fields.detect_lang_length or math.inf)
    clips = (Clip(start_s, end_s),) if start_s or end_s < math.inf else ()
    return replace(parse_transcription_request([], models), clips=clips)


class _Asr:
    def __init__(self, query: list[tuple[str, str]]) -> None:
        self.query = query

    def parse(self, pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
        self._fields = fields = read_fields([*self.query, *pairs], AsrFields)
        shows_words = fields.output == "json" and fields.task == "transcribe"
        if fields.diarize and (fields.output == "txt" or fields.task == "translate"):
            raise InvalidValue(
                "'diarize' needs task=transcribe, and output srt, vtt, tsv or json.", "diarize"
            )
        asked = [
            ("response_format", _FORMATS[fields.output]),
            ("prompt", fields.initial_prompt),
            ("language", fields.language),
        ]
        if fields.word_timestamps and shows_words:
            asked += [("timestamp_granularities", "segment"), ("timestamp_granularities", "word")]
        if fields.diarize:
            counts = (("min_speakers", fields.min_speakers), ("max_speakers", fields.max_speakers))
            asked += [("diarize", "true"), *((name, str(count)) for name, count in counts if count)]
        parse = parse_translation_request if fields.task == "translate" else parse_transcription_request
        without_effect = {*WITHOUT_EFFECT} | ({"word_timestamps"} if not shows_words else set())
        ignored = tuple(sorted(without_effect & fields.model_fields_set))
        return replace(parse(asked, models), ignored_fields=ignored)

    def reply(self, transcript: Transcript, request: TranscriptionRequest) -> Response:
        output = self._fields.output
        if output == "json":
            response: Response = JSONResponse(_json(transcript))
        elif output == "tsv":
            response = Response(tsv(transcript.segments), media_type="text/plain")
        else:
            response = body_response(transcript, request)
        response.headers["content-disposition"] = f'attachment; filename="transcript.{output}"'
        response.headers["asr-engine"] = "asr-server"
        return response


def _json(transcript: Transcript) -> dict[str, object]:
    return {
        "text": transcript.text,
        "segments": [_segment(segment) for segment in transcript.segments],
        "language": next(iter(transcript.languages), ""),
    }


def _segment(segment: Segment) -> dict[str, object]:
    body: dict[str, object] = msgspec.to_builtins(segment)
    body["start"], body["end"] = body.pop("start_s"), body.pop("end_s")
    body["words"] = [word_body(word, word.text).model_dump(exclude_none=True) for word in segment.words]
    return {name: value for name, value in body.items() if value not in (None, [], ())}
