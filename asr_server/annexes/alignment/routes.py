"""`POST /v1/audio/alignments`, and ElevenLabs' `/v1/forced-alignment`: the same in their shape."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive

from asr_server.annexes.alignment.align import Alignment, align, require_words
from asr_server.annexes.alignment.bodies import (
    AlignmentJson,
    Granularity,
    alignment_body,
    forced_alignment_answer,
)
from asr_server.api import openapi, transcribe
from asr_server.api.models import Models
from asr_server.api.request import (
    TranscriptionRequest,
    parse_transcription_request,
    read_fields,
    split_unknown,
)
from asr_server.api.state import AppState, get_state, require_key, require_key_in
from asr_server.api.upload import Form
from asr_server.audio.recording import Recording
from asr_server.core import Clip
from asr_server.formats.render import JSON


class _TextFields(BaseModel, extra="forbid", use_attribute_docstrings=True):
    text: str = ""
    """What is said, or should be: at least a word, at most 1 MiB."""


class AlignmentFields(_TextFields):
    model: str = ""
    """A name of the model that is served, as `/v1/models` lists them; absent: that model."""
    language: str = ""
    """Of the speech: a code (`de`, `de-AT`), an English name (`german`), or `auto`. Absent: detected."""
    granularity: Granularity = "word"
    """What gets times."""

    def answer(self, alignment: Alignment) -> str:
        return alignment_body(alignment, self.granularity).model_dump_json(exclude_none=True)


class ForcedAlignmentFields(_TextFields):
    enabled_spooled_file: bool = False
    """Changes nothing: a large file is kept on the disk anyway."""

    def answer(self, alignment: Alignment) -> bytes:
        return forced_alignment_answer(alignment)


class AlignmentResponse(transcribe.TranscriptionResponse):
    def __init__(self, state: AppState, fields_type: type[AlignmentFields | ForcedAlignmentFields]) -> None:
        super().__init__(state, self._parse)
        self._fields_type = fields_type

    def _parse(self, pairs: list[tuple[str, str]], models: Models) -> TranscriptionRequest:
        ignored: tuple[str, ...] = ()
        if models.default.settings.unknown_fields == "ignore":
            pairs, ignored = split_unknown(pairs, self._fields_type)
        self._fields = fields = read_fields(pairs, self._fields_type)
        require_words(fields.text)
        ignored += ("enabled_spooled_file",) if "enabled_spooled_file" in dict(pairs) else ()
        asked = [("response_format", "verbose_json"), ("timestamp_granularities", "word")]
        asked += [(name, value) for name, value in pairs if name in ("model", "language")]
        return replace(parse_transcription_request(asked, models), ignored_fields=ignored)

    async def _whole(self, form: Form, request: TranscriptionRequest, receive: Receive) -> Response:
        async with transcribe.transcribing(self._state, form, request, receive) as transcription:
            async for _ in transcription:
                pass
            transcript, source = await transcription.transcript(), await form.upload.source()

            def open_recording(clips: Sequence[Clip]) -> Recording:
                return transcribe.recording_for(replace(request, clips=tuple(clips)), source)

            alignment = await align(self._fields.text, transcript, request.model.transcriber, open_recording)
        body = await asyncio.to_thread(self._fields.answer, alignment)
        headers = transcribe.answer_headers(request.model, request.ignored_fields)
        headers |= transcribe.recording_headers(transcript)
        return Response(body, media_type=JSON, headers=headers)


def _form() -> dict[str, Any]:
    schema = AlignmentFields.model_json_schema()
    schema["properties"] = {"file": openapi.FILE_SCHEMA} | schema["properties"]
    schema["required"] = ["file", "text"]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "model": AlignmentJson,
        "description": "The text with its times.",
        "headers": openapi.described_headers(*openapi.TRANSCRIPT_HEADERS),
    }
}
router = APIRouter(tags=["audio"])


@router.post(
    "/v1/audio/alignments",
    dependencies=[Depends(require_key)],
    openapi_extra=_form(),
    responses=_ANSWER | openapi.error_responses(*openapi.RECORDING_ERRORS),
    response_model=None,
)
async def alignments(request: Request) -> Response:
    """Return when each word of a given text is said in a recording."""
    return AlignmentResponse(get_state(request), AlignmentFields)


@router.post(
    "/v1/forced-alignment",
    dependencies=[Depends(require_key_in("xi-api-key"))],
    include_in_schema=False,
    response_model=None,
)
async def forced_alignment(request: Request) -> Response:
    return AlignmentResponse(get_state(request), ForcedAlignmentFields)
