"""Where a reply is made, and who is refused before the first byte of an upload is read."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asr_server.api import transcribe
from asr_server.api.connections import OVER_LIMIT
from asr_server.config import MIB
from asr_server.errors import Overloaded
from tests.embedded import embedded
from tests.formats.samples import ONE, transcript


@pytest.mark.parametrize(("num_segments", "is_inline"), [(100, True), (101, False)])
async def test_a_reply_of_more_than_a_hundred_segments_is_made_in_a_thread(
    num_segments: int, is_inline: bool
) -> None:
    long = msgspec.structs.replace(transcript(text="one"), segments=ONE.segments[:1] * num_segments)
    maker = await transcribe._rendered(long, threading.current_thread)
    assert (maker is threading.main_thread()) == is_inline


@pytest.mark.parametrize("state", [{}, {"state": {}}, {"state": {OVER_LIMIT: False}}])
def test_a_connection_within_the_limit_is_served(state: dict[str, Any]) -> None:
    transcribe._require_connection(state)
    store: Any = SimpleNamespace()
    form = transcribe._form(SimpleNamespace(settings=embedded(), uploads=store), state, "file")  # type: ignore[arg-type]
    assert (form.file_name, form.upload._max_bytes, form.upload._sender) == ("file", 1024 * MIB, None)


def test_a_connection_over_the_limit_may_come_back_after_five_seconds() -> None:
    with pytest.raises(Overloaded, match="--max-connections") as caught:
        transcribe._require_connection({"state": {OVER_LIMIT: True}})
    assert caught.value.retry_after_s == 5.0
