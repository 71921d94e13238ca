"""`POST /inference` of whisper.cpp's server."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
    read_fields,
)
from asr_server.api.state import get_state, require_key
from asr_server.api.transcribe import TranscriptionResponse, body_response
from asr_server.core import Clip, Transcript
from asr_server.errors import InvalidValue
from asr_server.formats.render import verbose_body, word_body
from asr_server.transcription.language import name_of

router = APIRouter(dependencies=[Depends(require_key)], include_in_schema=False)

# What this server does by itself, or has no use for: the answer names them in x-ignored-fields.
WITHOUT_EFFECT: Final = frozenset(
    (
        *("audio_ctx", "beam_size", "best_of", "carry_initial_prompt", "debug_mode", "detect_language"),
        *("entropy_thold", "logprob_thold", "max_context", "no_context", "no_fallback", "no_speech_thold"),
        *("offset_n", "print_realtime", "processors", "suppress_non_speech", "suppress_nst"),
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
    split_on_word: bool = True


@router.post("/inference", response_model=None)
async def inference(request: Request) -> Response:
    own = _Inference()
    return TranscriptionResponse(get_state(request), own.parse, own.reply)


class _Inference:
    def parse(self, pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
        own = [(name, value.strip()) for name, value in pairs if name in InferenceFields.model_fields]
        self._fields = fields = read_fields(own, InferenceFields)
        ignored = tuple(dict.fromkeys(name for name, _ in pairs if name in WITHOUT_EFFECT))
        others = [pair for pair in pairs if pair[0] not in {*InferenceFields.model_fields, *WITHOUT_EFFECT}]
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
        parse = parse_translation_request if fields.translate else parse_transcription_request
        request = parse(others, models)
        return replace(request, clips=self._clips(), ignored_fields=request.ignored_fields + ignored)

    def _clips(self) -> tuple[Clip, ...]:
        start_s, duration_s = self._fields.offset_t / 1000, self._fields.duration / 1000
        return (Clip(start_s, start_s + (duration_s or math.inf)),) if start_s or duration_s else ()

    def reply(self, transcript: Transcript, request: TranscriptionRequest) -> Response:
        if request.fields.response_format != "verbose_json":
            return body_response(transcript, request)
        body = verbose_body(transcript).model_dump(exclude_none=True)
        for own, segment in zip(body["segments"], transcript.segments, strict=True):
            own["words"] = [
                word_body(word, word.text).model_dump(exclude_none=True) for word in segment.words
            ]
            if self._fields.no_timestamps:
                for timed in (own, *own["words"]):
                    del timed["start"], timed["end"]
        return JSONResponse(body | self._detected(transcript))

    def _detected(self, transcript: Transcript) -> dict[str, Any]:
        probability = transcript.language_probability
        if self._fields.no_language_probabilities or probability is None or not transcript.languages:
            return {}
        language = name_of(transcript.languages[0])
        return {"detected_language": language, "detected_language_probability": probability}
