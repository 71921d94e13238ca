"""The converted models: the same bytes each time, and 8-bit products whose sums fit on any processor."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from asr_server.audio.voice import load_onnx
from asr_server.speakers.campplus import convert_embedding
from asr_server.speakers.models import CONVOLUTIONS, EMBEDDING, FILTERS, LSTM, speaker_models
from asr_server.speakers.onnx_file import Graph
from asr_server.speakers.pyannet import convert_convolutions, convert_filters, convert_lstm
from tests.speakers.people import require_models


def test_a_conversion_gives_the_same_bytes_each_time() -> None:
    require_models()
    folder = speaker_models()
    assert folder
    for name, source, convert in (
        (FILTERS, "pytorch_model.bin", convert_filters),
        (CONVOLUTIONS, "pytorch_model.bin", convert_convolutions),
        (LSTM, "pytorch_model.bin", convert_lstm),
        (EMBEDDING, "campplus_cn_en_common.pt", convert_embedding),
    ):
        made = hashlib.sha256(convert(folder / source)).hexdigest()
        assert made == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_sums_of_large_products_do_not_overflow(tmp_path: Path) -> None:
    """As they did on processors without VNNI: the sum of two was at most 32767."""
    graph = Graph({"x": [1, 64]}, [1, 8])
    weights, scales = graph.constant(np.full((64, 8), 127, np.int8)), graph.constant(np.ones(8))
    zeros = graph.constant(np.zeros(8, np.int8))
    path = tmp_path / "product.onnx"
    path.write_bytes(graph.serialize(graph.add("DynamicQuantizeMatMul", "x", weights, scales, zeros)))
    (product,) = load_onnx(path).run(None, {"x": np.ones((1, 64), np.float32)})
    assert np.allclose(product, 64 * 127, rtol=0.01)
