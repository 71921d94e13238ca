"""The converted models: the same bytes each time, and the numbers that the published networks give."""

from __future__ import annotations

import hashlib

from asr_server.speakers.conversion import convert_embedding, convert_segmentation
from asr_server.speakers.models import EMBEDDING, SEGMENTATION, speaker_models
from tests.speakers.people import require_models


def test_a_conversion_gives_the_same_bytes_each_time() -> None:
    require_models()
    folder = speaker_models()
    assert folder
    for name, source, convert in (
        (SEGMENTATION, "pytorch_model.bin", convert_segmentation),
        (EMBEDDING, "campplus_cn_en_common.pt", convert_embedding),
    ):
        made = hashlib.sha256(convert(folder / source)).hexdigest()
        assert made == hashlib.sha256((folder / name).read_bytes()).hexdigest()
