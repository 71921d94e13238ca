"""Routes of other speech servers, so that their clients need only a new address.

Each renames fields to OpenAI's and shapes the reply; none transcribes. Bazarr and Lingarr call
whisper-asr-webservice's, where `encode=false` means raw 16-bit samples at 16 kHz.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from asr_server.api import transcribe
from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_request,
    parse_transcription_request,
    parse_translation_request,
    read_fields,
)
from asr_server.api.state import get_state, require_key, require_key_in
from asr_server.api.upload import Form, Pairs
from asr_server.audio.wav import unsized_header
from asr_server.core import SAMPLE_RATE, Clip, Segment, Transcript
from asr_server.errors import InvalidValue
from asr_server.formats.render import verbose_body, word_body
from asr_server.formats.subtitles import tsv
from asr_server.language_codes import name_of

_AZURE_KEY: Final = Depends(require_key_in("api-key"))
azure = APIRouter(prefix="/openai", dependencies=[_AZURE_KEY], include_in_schema=False)
whisper = APIRouter(dependencies=[Depends(require_key)], include_in_schema=False)


# -- whisper-asr-webservice ----------------------------------------------------------------------------------

FILE_NAME: Final = "audio_file"
_FORMATS: Final = {"txt": "text", "vtt": "vtt", "srt": "srt", "tsv": "verbose_json", "json": "verbose_json"}
PCM_HEAD: Final = unsized_header(SAMPLE_RATE, num_channels=1, sample_bytes=2)


class _File(BaseModel, extra="forbid"):
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


ASR_WITHOUT_EFFECT: Final = ("video_file", "vad_filter")


@whisper.post("/asr", response_model=None)
async def asr(request: Request) -> Response:
    own = _Asr(request.query_params.multi_items())
    head = _head(own.query, AsrFields)
    return transcribe.TranscriptionResponse(get_state(request), own.parse, own.reply, FILE_NAME, head)


@whisper.post("/detect-language", response_model=None)
async def detect_language(request: Request) -> Response:
    query = request.query_params.multi_items()
    head = _head(query, DetectionFields)
    return _Detection(get_state(request), partial(_parse_detection, query), None, FILE_NAME, head)


def _head(query: Pairs, fields_type: type[_File]) -> bytes:
    return b"" if read_fields(query, fields_type).encode else PCM_HEAD


class _Detection(transcribe.TranscriptionResponse):
    async def _whole(self, form: Form, request: TranscriptionRequest, receive: Receive) -> Response:
        code, probability = "", 0.0
        async with transcribe.transcribing(self._state, form, request, receive) as transcription:
            async for delta in transcription:
                if delta.text and delta.language:
                    found = transcription.language_probability
                    code, probability = delta.language, 1.0 if found is None else found
                    break
        name = name_of(code or None)
        body = {"detected_language": name, "language_code": code, "confidence": probability}
        return JSONResponse(body, headers=transcribe.answer_headers(request.model, request.ignored_fields))


def _parse_detection(query: Pairs, pairs: Pairs, models: Models) -> TranscriptionRequest:
    fields = read_fields([*query, *pairs], DetectionFields)
    clips = _clips(fields.detect_lang_offset, fields.detect_lang_length)
    ignored = ("video_file",) if fields.video_file else ()
    return replace(parse_transcription_request([], models), clips=clips, ignored_fields=ignored)


def _clips(start_s: float, duration_s: float | None) -> tuple[Clip, ...]:
    return (Clip(start_s, start_s + (duration_s or math.inf)),) if start_s or duration_s else ()


class _Asr:
    def __init__(self, query: Pairs) -> None:
        self.query = query

    def parse(self, pairs: Pairs, models: Models) -> TranscriptionRequest:
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
        without_effect = {*ASR_WITHOUT_EFFECT} | ({"word_timestamps"} if not shows_words else set())
        ignored = tuple(sorted(without_effect & fields.model_fields_set))
        return replace(parse_request(fields.task, asked, models), ignored_fields=ignored)

    def reply(self, transcript: Transcript, request: TranscriptionRequest) -> Response:
        output = self._fields.output
        if output == "json":
            segments, language = [*map(_segment, transcript.segments)], next(iter(transcript.languages), "")
            body = {"text": transcript.text, "segments": segments, "language": language}
            response: Response = JSONResponse(body)
        elif output == "tsv":
            response = Response(tsv(transcript.segments), media_type="text/plain")
        else:
            response = transcribe.body_response(transcript, request)
        response.headers["content-disposition"] = f'attachment; filename="transcript.{output}"'
        response.headers["asr-engine"] = "asr-server"
        return response


def _words(segment: Segment) -> list[dict[str, Any]]:
    """Return the words as both servers have them, with the spaces before them."""
    return [word_body(word, word.text).model_dump(exclude_none=True) for word in segment.words]


def _segment(segment: Segment) -> dict[str, object]:
    body: dict[str, object] = msgspec.to_builtins(segment)
    body["start"], body["end"] = body.pop("start_s"), body.pop("end_s")
    body["words"] = _words(segment)
    return {name: value for name, value in body.items() if value not in (None, [], ())}


# -- whisper.cpp ---------------------------------------------------------------------------------------------

# What this server does by itself, or has no use for: the answer names them in x-ignored-fields.
INFERENCE_WITHOUT_EFFECT: Final = frozenset(
    (
        *("audio_ctx", "beam_size", "best_of", "carry_initial_prompt", "debug_mode", "detect_language"),
        *("entropy_thold", "logprob_thold", "max_context", "no_context", "no_fallback", "no_speech_thold"),
        *("offset_n", "print_realtime", "processors", "split_on_word", "suppress_non_speech", "suppress_nst"),
        *("temperature_inc", "threads", "tinydiarize", "token_timestamps", "word_thold"),
        *("vad", "vad_threshold", "vad_min_speech_duration_ms", "vad_min_silence_duration_ms"),
        *("vad_max_speech_duration_s", "vad_speech_pad_ms", "vad_samples_overlap"),
    )
)


class InferenceFields(BaseModel):
    translate: bool = False
    diarize: bool = False
    no_timestamps: bool = False
    no_language_probabilities: bool = False
    offset_t: int = Field(0, ge=0)
    duration: int = Field(0, ge=0)
    max_len: int = Field(0, ge=0)


@whisper.post("/inference", response_model=None)
async def inference(request: Request) -> Response:
    own = _Inference()
    return transcribe.TranscriptionResponse(get_state(request), own.parse, own.reply)


class _Inference:
    def parse(self, pairs: Pairs, models: Models) -> TranscriptionRequest:
        own = [(name, value.strip()) for name, value in pairs if name in InferenceFields.model_fields]
        self._fields = fields = read_fields(own, InferenceFields)
        ignored = tuple(dict.fromkeys(name for name, _ in pairs if name in INFERENCE_WITHOUT_EFFECT))
        known = {*InferenceFields.model_fields, *INFERENCE_WITHOUT_EFFECT}
        others = [pair for pair in pairs if pair[0] not in known]
        response_format = dict(others).get("response_format", "json")
        if fields.diarize and response_format in ("json", "text"):
            raise InvalidValue("'diarize' needs response_format srt, vtt or verbose_json.", "diarize")
        others += [("channels", "split")] if fields.diarize else []
        if fields.max_len and (fields.translate or response_format not in ("srt", "vtt")):
            ignored += ("max_len",)
        elif fields.max_len:
            others += [("max_line_width", str(fields.max_len)), ("max_line_count", "1")]
        if response_format == "verbose_json" and not fields.translate:
            others += [("timestamp_granularities", "segment"), ("timestamp_granularities", "word")]
        request = parse_request("translate" if fields.translate else "transcribe", others, models)
        clips = _clips(fields.offset_t / 1000, fields.duration / 1000)
        return replace(request, clips=clips, ignored_fields=request.ignored_fields + ignored)

    def reply(self, transcript: Transcript, request: TranscriptionRequest) -> Response:
        if request.fields.response_format != "verbose_json":
            return transcribe.body_response(transcript, request)
        body = verbose_body(transcript).model_dump(exclude_none=True)
        for own, segment in zip(body["segments"], transcript.segments, strict=True):
            own["words"] = _words(segment)
            if self._fields.no_timestamps:
                for timed in (own, *own["words"]):
                    del timed["start"], timed["end"]
        probability, is_wanted = transcript.language_probability, not self._fields.no_language_probabilities
        if is_wanted and probability is not None and transcript.languages:
            body["detected_language"] = name_of(transcript.languages[0])
            body["detected_language_probability"] = probability
        return JSONResponse(body)


# -- Azure OpenAI --------------------------------------------------------------------------------------------


@azure.post("/deployments/{deployment}/audio/transcriptions", response_model=None)
@azure.post("/v1/audio/transcriptions", response_model=None)
async def transcribe_for_azure(request: Request) -> Response:
    return _response(request, parse_transcription_request)


@azure.post("/deployments/{deployment}/audio/translations", response_model=None)
@azure.post("/v1/audio/translations", response_model=None)
async def translate_for_azure(request: Request) -> Response:
    return _response(request, parse_translation_request)


def _response(request: Request, parse: transcribe.RequestParser) -> Response:
    deployment = request.path_params.get("deployment", "")

    def parse_for_deployment(pairs: Pairs, models: Models) -> TranscriptionRequest:
        others = [(name, value) for name, value in pairs if name != "model"]
        return parse([("model", deployment), *others], models)

    return transcribe.TranscriptionResponse(get_state(request), parse_for_deployment if deployment else parse)
