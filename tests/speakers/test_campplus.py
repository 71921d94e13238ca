"""The converted network that embeds voices: the same bytes each time."""

from __future__ import annotations

from asr_server.speakers.campplus import convert_embedding
from asr_server.speakers.models import EMBEDDING, speaker_models
from tests.speakers.people import require_models


def test_a_conversion_gives_the_same_bytes_each_time() -> None:
    require_models()
    folder = speaker_models()
    assert folder
    made = convert_embedding(folder / "campplus_cn_en_common.pt")
    assert made == (folder / EMBEDDING).read_bytes()
