"""The routes POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from asr_server.api.auth import require_key
from asr_server.api.openapi_replies import form_of, transcript_responses
from asr_server.api.request import parse_transcription_request, parse_translation_request
from asr_server.api.response import TranscriptionResponse
from asr_server.api.schemas import TranscriptionFields, TranslationFields
from asr_server.api.state import get_state

router = APIRouter(prefix="/v1/audio", dependencies=[Depends(require_key)], tags=["audio"])


@router.post(
    "/transcriptions",
    openapi_extra=form_of(TranscriptionFields),
    responses=transcript_responses(),
    response_model=None,
)
async def transcribe(request: Request) -> Response:
    """A recording as text, in its own language."""
    return TranscriptionResponse(get_state(request), parse_transcription_request)


@router.post(
    "/translations",
    openapi_extra=form_of(TranslationFields),
    responses=transcript_responses(),
    response_model=None,
)
async def translate(request: Request) -> Response:
    """A recording as English text."""
    return TranscriptionResponse(get_state(request), parse_translation_request)
