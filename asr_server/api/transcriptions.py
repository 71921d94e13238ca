"""The routes POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from asr_server.api.auth import require_key
from asr_server.api.request import parse_transcription_request, parse_translation_request
from asr_server.api.response import TranscriptionResponse
from asr_server.api.schemas import AudioFields, TranscriptionFields, TranslationFields
from asr_server.api.state import get_state

router = APIRouter(prefix="/v1/audio", dependencies=[Depends(require_key)], tags=["audio"])


def _form_of(fields_type: type[AudioFields]) -> dict[str, Any]:
    """The form for the API's description; it is read by `form.py`, not by the framework."""
    schema = fields_type.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    schema["properties"] = {"file": {"type": "string", "format": "binary"}} | schema["properties"]
    schema["properties"].pop("chunking_strategy", None)
    schema["required"] = ["file", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post("/transcriptions", openapi_extra=_form_of(TranscriptionFields), response_model=None)
async def transcribe(request: Request) -> Response:
    return TranscriptionResponse(get_state(request), parse_transcription_request)


@router.post("/translations", openapi_extra=_form_of(TranslationFields), response_model=None)
async def translate(request: Request) -> Response:
    return TranscriptionResponse(get_state(request), parse_translation_request)
