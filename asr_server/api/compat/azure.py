"""Azure OpenAI's audio routes: the deployment is the model, `api-key` may hold the key."""

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
from asr_server.api.state import get_state, require_azure_key
from asr_server.api.transcribe import RequestParser, TranscriptionResponse

router = APIRouter(
    prefix="/openai/deployments/{deployment}/audio",
    dependencies=[Depends(require_azure_key)],
    include_in_schema=False,
)


@router.post("/transcriptions", response_model=None)
async def transcribe(deployment: str, request: Request) -> Response:
    parse = partial(_parse, deployment, parse_transcription_request)
    return TranscriptionResponse(get_state(request), parse)


@router.post("/translations", response_model=None)
async def translate(deployment: str, request: Request) -> Response:
    return TranscriptionResponse(get_state(request), partial(_parse, deployment, parse_translation_request))


def _parse(
    deployment: str, parse_request: RequestParser, pairs: list[tuple[str, str]], models: Models
) -> TranscriptionRequest:
    others = [(name, value) for name, value in pairs if name != "model"]
    return parse_request([("model", deployment), *others], models)
