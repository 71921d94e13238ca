"""Azure OpenAI's audio routes: `api-key` may hold the key, and a deployment is a name of the model."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    parse_translation_request,
)
from asr_server.api.state import get_state, require_key, set_caller
from asr_server.api.transcribe import RequestParser, TranscriptionResponse


async def require_azure_key(request: Request) -> None:
    """Take the key from `api-key` or the usual header. Raises InvalidApiKey."""
    if key := request.headers.get("api-key"):
        set_caller(request, get_state(request).api_keys.check(f"Bearer {key}"))
    else:
        await require_key(request)


router = APIRouter(prefix="/openai", dependencies=[Depends(require_azure_key)], include_in_schema=False)


@router.post("/deployments/{deployment}/audio/transcriptions", response_model=None)
async def transcribe(deployment: str, request: Request) -> Response:
    parse = partial(_parse, deployment, parse_transcription_request)
    return TranscriptionResponse(get_state(request), parse)


@router.post("/deployments/{deployment}/audio/translations", response_model=None)
async def translate(deployment: str, request: Request) -> Response:
    return TranscriptionResponse(get_state(request), partial(_parse, deployment, parse_translation_request))


@router.post("/v1/audio/transcriptions", response_model=None)
async def transcribe_by_model(request: Request) -> Response:
    return TranscriptionResponse(get_state(request), parse_transcription_request)


@router.post("/v1/audio/translations", response_model=None)
async def translate_by_model(request: Request) -> Response:
    return TranscriptionResponse(get_state(request), parse_translation_request)


def _parse(
    deployment: str, parse_request: RequestParser, pairs: list[tuple[str, str]], models: Models
) -> TranscriptionRequest:
    others = [(name, value) for name, value in pairs if name != "model"]
    return parse_request([("model", deployment), *others], models)
