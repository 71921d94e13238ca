"""The tables, numbers and shown replies of docs/, against the server and the code."""

import json
import re
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from asr_server import errors
from asr_server.annexes import compat
from asr_server.annexes.alignment.align import GREATEST_LOSS
from asr_server.annexes.alignment.bodies import AlignmentJson
from asr_server.annexes.alignment.routes import AlignmentFields, ForcedAlignmentFields
from asr_server.annexes.alignment.stretches import MAX_READ_S
from asr_server.annexes.model_sources.names import repositories
from asr_server.api.errors import FOREIGN_FIELDS
from asr_server.api.models import Models
from asr_server.api.schemas import TranscriptionFields, TranslationFields
from asr_server.api.upload import MAX_LONG_BYTES
from asr_server.config import MIB
from asr_server.errors import ModelNotFound
from asr_server.server.settings import ServerSettings
from tests.conftest import Server
from tests.contract.test_documentation import ROOT, blocks_of
from tests.contract.test_documented_names import rows_of
from tests.support.embedded import embedded
from tests.support.speech import say
from tests.unit.api.running_app import RunningApp, error_of, run_app, served
from tests.unit.api.sample_files import sound_file

DOCS = Path(__file__).parents[2] / "docs"


def rows(page: str, head: str) -> list[list[str]]:
    return rows_of(DOCS / page, head)


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


async def test_each_route_of_the_documents_answers(app: RunningApp) -> None:
    api = [name for row in rows("api.md", "|") for name in quoted(row[0])]
    compatible = [name for row in rows("clients.md", "server") for name in quoted(row[1])]
    method = "GET"
    for name in api + compatible:
        method, _, path = name.rpartition(" ") if " " in name else (method, "", name)
        if method != "WS":
            reply = await app.client.request(method, path.replace("NAME", "whisper-1").partition("?")[0])
            assert reply.status_code not in (404, 405), name


async def test_each_operation_of_the_api_is_in_a_table_of_a_page(app: RunningApp) -> None:
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    for path in (await app.client.get("/openapi.json")).json()["paths"]:
        assert path.replace("{name}", "NAME") in text, path


@pytest.mark.parametrize("name", sorted({*TranscriptionFields.model_fields, *TranslationFields.model_fields}))
def test_each_field_is_in_a_page(name: str) -> None:
    pages = ("api.md", "speakers.md", "exactness.md")
    assert any(re.search(rf"\b{name}\b", (DOCS / page).read_text()) for page in pages)


def test_the_page_of_alignments_has_its_fields_its_answer_and_its_numbers() -> None:
    page = (DOCS / "alignment.md").read_text()
    assert {name for row in rows("alignment.md", "field") for name in quoted(row[0])} == {
        *AlignmentFields.model_fields,
        "file",
    }
    example = page.partition("```json")[2].partition("```")[0]
    shown = AlignmentJson.model_validate_json(example)
    assert shown.model_fields_set == AlignmentJson.model_fields.keys() - {"characters", "truncated", "tracks"}
    assert f"{MAX_LONG_BYTES // MIB} MiB" in page
    assert f"{GREATEST_LOSS:.2f}" in page
    assert f"more than {MAX_READ_S:g} s" in page


COMPATIBLE: dict[str, tuple[type[BaseModel], str, frozenset[str]]] = {
    "POST /asr": (compat.AsrFields, "audio_file", frozenset(compat.ASR_WITHOUT_EFFECT)),
    "POST /detect-language": (compat.DetectionFields, "audio_file", frozenset({"video_file"})),
    "POST /v1/forced-alignment": (ForcedAlignmentFields, "file", frozenset({"enabled_spooled_file"})),
    "POST /inference": (compat.InferenceFields, "file", compat.INFERENCE_WITHOUT_EFFECT),
}


@pytest.mark.parametrize("route", COMPATIBLE)
def test_the_page_of_clients_lists_the_fields_of_other_servers(route: str) -> None:
    fields, file, without_effect = COMPATIBLE[route]
    (row,) = (row for row in rows("clients.md", "server") if row[1] == f"`{route}`")
    assert set(quoted(row[2])) == {*fields.model_fields, file} - without_effect
    assert set(quoted(row[3])) == without_effect


def kinds(kind: type[errors.ReportedError]) -> Iterator[type[errors.ReportedError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from kinds(child)


def test_the_page_of_errors_lists_each_code_with_its_status() -> None:
    listed = {(int(row[0]), code) for row in rows("errors.md", "status") for code in quoted(row[1])}
    made = {(kind.status, kind.code) for kind in kinds(errors.ReportedError) if hasattr(kind, "code")}
    assert listed == {(status, code) for status, code in made if status >= HTTPStatus.BAD_REQUEST}


def test_the_largest_upload_that_a_page_names_is_the_settings() -> None:
    assert ServerSettings.max_upload_bytes == 1024 * MIB
    assert "1 GiB an upload" in (DOCS / "from-openai.md").read_text()


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/audio/transcriptions", "it is /v1/audio/transcriptions. A client's base URL ends in /v1"),
        ("POST", "/v1/v1/audio/transcriptions", "it is /v1/audio/transcriptions."),
        ("POST", "/v1/audio/transcriptions/audio/transcriptions", "it is /v1/audio/transcriptions."),
        ("GET", "/models", "it is /v1/models."),
        ("POST", "/v1/chat/completions", "no other route of OpenAI's"),
        ("POST", "/v1/audio/speech", "no other route of OpenAI's"),
    ],
)
async def test_a_path_that_is_not_here_is_answered_with_the_one_that_is(
    app: RunningApp, method: str, path: str, hint: str
) -> None:
    reply = await app.client.request(method, path)
    assert reply.status_code == 404
    assert str(error_of(reply)["message"]).startswith(f"There is no {path} here")
    assert hint in str(error_of(reply)["message"])


async def test_ten_fields_that_people_bring_are_answered_with_what_to_send() -> None:
    assert len(FOREIGN_FIELDS) == 10
    async with run_app(embedded(unknown_fields="refuse")) as app:
        error = error_of(await app.post(word_timestamps="true"))
    assert error["param"] == "word_timestamps"
    assert "timestamp_granularities[]=word" in str(error["message"])


@pytest.mark.parametrize(
    ("name", "is_served"),
    [
        ("Systran/faster-whisper-base", True),
        ("openai/whisper-base", True),
        ("openai/whisper-small", False),
        ("Systran/faster-whisper-large-v3", False),
    ],
)
def test_a_model_answers_to_its_own_repositories(name: str, is_served: bool) -> None:
    model = served(ServerSettings(served_model_name="base"))
    model.repositories = repositories("Systran/faster-whisper-base")
    models = Models([model])
    if is_served:
        assert models.choose(name).name == "base"
    else:
        with pytest.raises(ModelNotFound):
            models.choose(name)


SHOWN = [json.loads(block) for block in blocks_of(ROOT / "docs" / "formats.md", "json")]
ASKED: tuple[dict[str, Any], ...] = (
    {"response_format": "json"},
    {"response_format": "json", "include[]": "logprobs"},
    {"response_format": "verbose_json", "timestamp_granularities[]": ["segment", "word"]},
    {"response_format": "diarized_json"},
)
OPTIONAL = {"language_probability", "dropped", "truncated", "tracks"}


def shape_of(value: object) -> object:
    """Return its fields and those of the first entry of each list."""
    if isinstance(value, dict):
        return {name: shape_of(each) for name, each in value.items() if name not in OPTIONAL}
    return [shape_of(each) for each in value[:1]] if isinstance(value, list) else None


@pytest.mark.parametrize(
    ("shown", "fields"),
    list(zip(SHOWN, ASKED, strict=True)),
    ids=["json", "logprobs", "verbose_json", "diarized_json"],
)
def test_json_shown_has_a_real_answers_fields(server: Server, shown: object, fields: dict[str, Any]) -> None:
    file = sound_file(say("314159", gap_s=0.2).samples)
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions", files={"file": file}, data=fields, timeout=100
    )
    assert shape_of(shown) == shape_of(answer.json())


KIB, GIB, MS, MINUTE = 1 << 10, 1 << 30, 0.001, 60.0
NAMES = {"MIB": MIB}
# Page, what it says, the constant ("file:NAME" where a name occurs twice), and the unit of the page.
STATED: tuple[tuple[str, str, str, float], ...] = (
    ("api.md", "the last {} minutes of the server", "activity.py:WINDOW_S", MINUTE),
    ("api.md", "A value is at most {} KiB", "MAX_VALUE_BYTES", KIB),
    ("errors.md", "under {} s", "MIN_AUDIO_S", 1),
    ("keys.md", "Up to {} keys", "MAX_KEYS", 1),
    ("limits.md", "computes {} s on one block", "BLOCK_CPU_S", 1),
    ("limits.md", "more than {} GiB of memory", "MAX_DATA_BYTES", GIB),
    ("limits.md", "no processor for {} s", "BLOCK_WALL_S", 1),
    ("limits.md", "no answer for {} s", "MAX_SILENCE_MS", 1 / MS),
    ("monitoring.md", "at most {} request", "MAX_ANSWERS", 1),
    ("operations.md", "for more than {} seconds", "FROZEN_AFTER_S", 1),
    ("page.md", "{} GiB in the browser", "sounds.js:MOST_BYTES", GIB),
    ("page.md", "{} stay, or fewer", "store.js:MOST", 1),
    ("page.md", "{} million characters", "MOST_CHARACTERS", 1e6),
    ("realtime.md", "more than {} MiB ends the session", "MAX_MESSAGE_BYTES", MIB),
    ("realtime.md", "A commit of under {} ms", "MIN_COMMIT_MS", 1),
    ("realtime.md", "reads nothing for {} s", "MAX_SEND_S", 1),
)


@cache
def constants() -> dict[str, str]:
    """Return the expression of each constant, by its name and by file and name."""
    found: dict[str, str] = {}
    files = [path for pattern in ("*.py", "*.js") for path in (ROOT / "asr_server").rglob(pattern)]
    for path in files:
        line = r"^(?:export )?(?:const )?_?([A-Z][A-Z_0-9]+)(?:: [\w\[\]]+)? = ([^#;\n]+?)(?:;.*|\s*#.*)?$"
        for name, expression in re.findall(line, path.read_text("utf-8"), re.MULTILINE):
            found[name] = found[f"{path.name}:{name}"] = expression
    return found


@pytest.mark.parametrize(
    ("page", "text", "name", "unit"), STATED, ids=[f"{row[0]}-{row[2]}" for row in STATED]
)
def test_a_number_in_prose_is_that_of_its_constant(page: str, text: str, name: str, unit: float) -> None:
    value = float(eval(constants()[name], dict(NAMES))) / unit
    words = " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    assert text.format(f"{round(value, 1):g}") in words
