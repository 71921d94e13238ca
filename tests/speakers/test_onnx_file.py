"""Graphs in their file: as onnxruntime reads them, and the same bytes each time."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asr_server.audio.voice import load_onnx
from asr_server.speakers.onnx_file import END, Graph, int8


def loaded(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "graph.onnx"
    path.write_bytes(content)
    return load_onnx(path)


def test_a_graph_computes_what_its_nodes_say(tmp_path: Path) -> None:
    graph = Graph({"x": ["batch", 3, 4]}, ["batch", 3, 2])
    x = graph.add("Transpose", "x", perm=[0, 2, 1])
    x = graph.add("Slice", x, graph.constant([-3]), graph.constant([END]), graph.constant([1]))
    x = graph.add("LeakyRelu", x, alpha=0.25)
    for kind, last in ((np.uint8, 255), (np.int8, -128), (np.int32, -70_000)):
        constant = graph.constant(np.array([1, 2, last], kind))
        x = graph.add("Add", x, graph.add("Cast", constant, to=1))
    x = graph.add("Add", x, graph.constant([0.5, 0.5, 0.5]))  # float64, for which there is float32
    weights = {"l.weight": np.eye(3, dtype=np.float32)[:2, :, None], "l.bias": np.array([5, 6], np.float32)}
    x = graph.linear(weights, x, "l")
    content = graph.serialize(graph.add("Einsum", x, equation="brc->brc"))
    session = loaded(tmp_path, content)
    values = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4)
    (found,) = session.run(None, {"x": values})
    moved = values.transpose(0, 2, 1)[:, -3:]
    expected = np.where(moved < 0, 0.25 * moved, moved)[:, :, :2] + [3.5 + 5, 6.5 + 6]
    assert np.array_equal(found, expected)
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape) == ("x", "tensor(float)", ["batch", 3, 4])
    assert (made.name, made.type, made.shape) == ("output", "tensor(float)", ["batch", 3, 2])
    assert session.get_modelmeta().graph_name == "graph"
    digest = hashlib.sha256(content).hexdigest()
    assert digest == "1cdcf8ab78ee0d2869e53d55534fa426befcb561de36a0377ab1551388a5e849", (
        "files that were made before would be others"
    )


def test_sums_of_large_products_do_not_overflow(tmp_path: Path) -> None:
    """As they did on processors without VNNI: the sum of two was at most 32767."""
    graph = Graph({"x": [1, 64]}, [1, 8])
    weights, scales = graph.constant(np.full((64, 8), 127, np.int8)), graph.constant(np.ones(8))
    zeros = graph.constant(np.zeros(8, np.int8))
    session = loaded(
        tmp_path, graph.serialize(graph.add("DynamicQuantizeMatMul", "x", weights, scales, zeros))
    )
    (product,) = session.run(None, {"x": np.ones((1, 64), np.float32)})
    assert np.allclose(product, 64 * 127, rtol=0.01)


@pytest.mark.parametrize("largest", [127, 63])
def test_weights_in_eight_bits_are_within_half_a_step_of_what_they_were(largest: int) -> None:
    kernel = np.random.default_rng(0).standard_normal((2, 50, 6)).astype(np.float32)
    values, scale = int8(kernel) if largest == 127 else int8(kernel, largest)
    assert values.dtype == np.int8
    assert (values.shape, scale.shape) == (kernel.shape, (2, 6))
    assert (np.abs(values.astype(int)).max(axis=1) == largest).all(), "each column uses all levels"
    assert (np.abs(values * scale[:, None] - kernel) <= scale[:, None] * 0.5001).all()
