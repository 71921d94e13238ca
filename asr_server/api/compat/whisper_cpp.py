"""`POST /inference` of whisper.cpp's server."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.state import get_state, require_key
from asr_server.api.transcribe import TranscriptionResponse

router = APIRouter(dependencies=[Depends(require_key)], include_in_schema=False)

_TRUE: Final = frozenset(("1", "true", "yes", "on"))
# What this server does by itself, or has no use for: times are always there, the beam is a setting.
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("audio_ctx", "beam_size", "best_of", "carry_initial_prompt", "debug_mode", "detect_language"),
        *("diarize", "entropy_thold", "logprob_thold", "max_context", "max_len", "no_context"),
        *("no_fallback", "no_speech_thold", "no_timestamps", "print_realtime", "processors"),
        *("split_on_word", "suppress_non_speech", "suppress_nst", "temperature_inc", "threads"),
        *("tinydiarize", "token_timestamps", "vad", "word_thold"),
    )
)


@router.post("/inference", response_model=None)
async def inference(request: Request) -> Response:
    return TranscriptionResponse(get_state(request), _parse)


def _parse(pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
    given = dict(pairs)
    translates = given.pop("translate", "").strip().lower() in _TRUE
    renamed = [(name, value) for name, value in pairs if name in given and name not in _WITHOUT_EFFECT]
    if translates:
        return parse_translation_request(renamed, models)
    if given.get("response_format") == "verbose_json":
        renamed += [("timestamp_granularities", "segment"), ("timestamp_granularities", "word")]
    return parse_transcription_request(renamed, models)
