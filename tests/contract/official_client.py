"""What the end-to-end tests share: the official client's call, the text in an answer, errors counted."""

import re
from typing import Any

from openai import AsyncOpenAI

from tests.support.speech import say

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
CUE = re.compile(r"(\d\d:\d\d:\d\d)[,.](\d{3}) --> (\d\d:\d\d:\d\d)[,.](\d{3})")
SPOKEN = say("314159", gap_s=[0.2, 0.2, 1.2, 0.2, 0.2, 0.5])


async def transcribe(client: AsyncOpenAI, file: bytes, name: str = "upload", **options: Any) -> Any:
    return await client.audio.transcriptions.create(file=(name, file), model="whisper-1", **options)


def plain(answer: Any, response_format: str) -> str:
    """The text in any of the formats."""
    return str(answer.text) if response_format in ("json", "verbose_json") else plain_text(answer)


def plain_text(answer: str) -> str:
    """The text in what may be subtitles."""
    lines = [line for line in answer.splitlines() if line and line != "WEBVTT"]
    return " ".join(line for line in lines if not CUE.match(line) and not line.isdecimal())
