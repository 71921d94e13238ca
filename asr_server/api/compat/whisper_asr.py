"""whisper-asr-webservice's `POST /asr` and `POST /detect-language`, as Bazarr and Lingarr call them.

Fields are in the query, the recording in `audio_file`; `encode=false` means raw 16-bit samples at 16 kHz.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from asr_server.api.form import Form
from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.state import get_state, require_key
from asr_server.api.transcribe import TranscriptionResponse, body_response, transcribing
from asr_server.audio.wav import unsized_header
from asr_server.core import SAMPLE_RATE, Segment, Transcript
from asr_server.formats.subtitles import tsv
from asr_server.transcription.language import name_of

router = APIRouter(dependencies=[Depends(require_key)], include_in_schema=False)

FILE_NAME: Final = "audio_file"
Output = Literal["txt", "vtt", "srt", "tsv", "json"]
_FORMATS: Final = {"txt": "text", "vtt": "vtt", "srt": "srt", "tsv": "verbose_json", "json": "verbose_json"}
PCM_HEAD: Final = unsized_header(SAMPLE_RATE, num_channels=1, sample_bytes=2)


class AsrQuery(BaseModel):
    """`vad_filter` and `video_file` are accepted and not needed."""

    encode: bool = True
    task: Literal["transcribe", "translate"] = "transcribe"
    language: str = ""
    initial_prompt: str = ""
    word_timestamps: bool = False
    output: Output = "txt"
    diarize: bool = False
    min_speakers: int | None = None
    max_speakers: int | None = None


@router.post("/asr", response_model=None)
async def asr(request: Request, query: Annotated[AsrQuery, Query()]) -> Response:
    head = b"" if query.encode else PCM_HEAD
    reply = partial(_reply, query.output)
    return TranscriptionResponse(get_state(request), partial(_parse, query), reply, FILE_NAME, head)


@router.post("/detect-language", response_model=None)
async def detect_language(request: Request, encode: bool = True) -> Response:
    return _Detection(get_state(request), _parse_detection, None, FILE_NAME, b"" if encode else PCM_HEAD)


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


def _parse_detection(pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
    return parse_transcription_request([], models)


def _parse(query: AsrQuery, pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
    fields = [
        ("response_format", _FORMATS[query.output]),
        ("prompt", query.initial_prompt),
        ("language", query.language),
    ]
    if query.task == "translate":
        return parse_translation_request(fields, models)
    if query.output == "json" and query.word_timestamps:
        fields += [("timestamp_granularities", "segment"), ("timestamp_granularities", "word")]
    if query.diarize and query.output != "txt":
        fields.append(("diarize", "true"))
        counts = (("min_speakers", query.min_speakers), ("max_speakers", query.max_speakers))
        fields += [(name, str(count)) for name, count in counts if count is not None]
    return parse_transcription_request(fields, models)


def _reply(output: Output, transcript: Transcript, request: TranscriptionRequest) -> Response:
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
    words = [{"word": word.text, "start": word.start_s, "end": word.end_s} for word in segment.words]
    body |= {"words": words} if words else {}
    return {name: value for name, value in body.items() if value not in (None, [], ())}
