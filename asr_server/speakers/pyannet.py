"""Make the ONNX files of segmentation-3.0, which says who speaks when.

The network is pyannote's PyanNet (`pyannote/audio/models/segmentation/PyanNet.py`, MIT), the filters
asteroid-filterbanks' `ParamSincFB`: three graphs for `segmentation.py`. Equal weights give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.pickled import read_torch
from asr_server.speakers.onnx_file import END, Attribute, Graph, Weights, int8

NUM_CLASSES: Final = 7  # nobody, each of three, each two of three
NUM_FILTERS, NUM_FEATURES = 80, 60
_SAMPLE_RATE: Final = 16_000
_MIN_HZ: Final = 50.0  # of a sinc filter: of its lower edge, and of its width
_STRIDE: Final = 10  # samples between two values of the sinc filters
_POOLING: Final = 3
_LSTM_LAYERS, _LSTM_SIZE = 4, 128
_SLOPE: Final = 0.01  # of the leaky ReLU below zero
_EPSILON: Final = 1e-5  # of all norms


def convert_filters(source: Path) -> bytes:
    """Convert: samples [batch, num_samples] in, [batch, 160, num_positions] out.

    80 sinc filters give their maximum and minimum in 30 samples. Normalising afterwards is equal, so
    overlapping windows share this work.
    """
    filters = _sinc_filters(read_torch(source, "state_dict"))
    graph = Graph({"samples": ["batch", "samples"]}, ["batch", 2 * NUM_FILTERS, "positions"])
    x = graph.add("Unsqueeze", "samples", graph.constant([1]))
    # As a convolution for each of the three values that are pooled: for large ones MaxPool is slow.
    kernel, axis = graph.constant(filters), graph.constant([2])
    values = []
    for place in range(_POOLING):
        start, left_out = place * _STRIDE, (_POOLING - 1 - place) * _STRIDE
        end = -left_out if left_out else END
        moved = graph.add("Slice", x, graph.constant([start]), graph.constant([end]), axis)
        values.append(graph.add("Conv", moved, kernel, strides=[_POOLING * _STRIDE]))
    least = graph.add("Neg", graph.add("Min", *values))
    return graph.serialize(graph.add("Concat", graph.add("Max", *values), least, axis=1))


def convert_convolutions(source: Path) -> bytes:
    """Convert: filtered [batch, 160, num_positions], mean and variance [batch, 1, 1] in; [batch, 60,
    num_frames] out.
    """
    weights = read_torch(source, "state_dict")
    graph = Graph(
        {
            "filtered": ["batch", 2 * NUM_FILTERS, "positions"],
            "mean": ["batch", 1, 1],
            "variance": ["batch", 1, 1],
        },
        ["batch", NUM_FEATURES, "frames"],
    )
    x = _magnitudes(graph, weights)
    for layer in range(3):
        if layer:
            x = _conv(graph, weights, x, f"sincnet.conv1d.{layer}")
            x = graph.add("MaxPool", x, kernel_shape=[_POOLING], strides=[_POOLING])
        x = graph.add("LeakyRelu", _instance_norm(graph, weights, x, f"sincnet.norm1d.{layer}"), alpha=_SLOPE)
    return graph.serialize(x)


def convert_lstm(source: Path) -> bytes:
    """Convert: features [batch, 60, num_frames] in, class log-probabilities [batch, num_frames, 7] out."""
    weights = read_torch(source, "state_dict")
    graph = Graph({"features": ["batch", NUM_FEATURES, "frames"]}, ["batch", "frames", NUM_CLASSES])
    x = graph.add("Transpose", "features", perm=[2, 0, 1])  # time first, as ONNX's LSTM wants it
    for layer in range(_LSTM_LAYERS):
        lstm = _lstm(graph, weights, layer)
        x = graph.add("DynamicQuantizeLSTM", x, *lstm, hidden_size=_LSTM_SIZE, direction="bidirectional")
        x = graph.add("Transpose", x, perm=[0, 2, 1, 3])
        x = graph.add("Reshape", x, graph.constant([0, 0, 2 * _LSTM_SIZE]))
    for name in ("linear.0", "linear.1"):
        x = graph.add("LeakyRelu", graph.linear(weights, x, name), alpha=_SLOPE)
    x = graph.add("LogSoftmax", graph.linear(weights, x, "classifier"), axis=-1)
    return graph.serialize(graph.add("Transpose", x, perm=[1, 0, 2]))


def _magnitudes(graph: Graph, weights: Weights) -> str:
    scale, shift = weights["sincnet.wav_norm1d.weight"], weights["sincnet.wav_norm1d.bias"]
    sums = graph.constant(_sinc_filters(weights).sum(axis=-1)[None])
    deviation = graph.add("Sqrt", graph.add("Add", "variance", graph.constant(np.float32(_EPSILON))))
    factor = graph.add("Div", graph.constant(scale), deviation)
    added = graph.add("Sub", graph.constant(shift), graph.add("Mul", factor, "mean"))
    added = graph.add("Mul", sums, added)
    both = graph.add("Mul", "filtered", factor)
    bounds = (0, NUM_FILTERS), (NUM_FILTERS, 2 * NUM_FILTERS)
    most, least = (
        graph.add("Slice", both, graph.constant([start]), graph.constant([end]), graph.constant([1]))
        for start, end in bounds
    )
    return graph.add("Max", graph.add("Add", most, added), graph.add("Sub", least, added))


def _sinc_filters(weights: Weights) -> npt.NDArray[np.float32]:
    bank = "sincnet.conv1d.0.filterbank."
    low = _MIN_HZ + np.abs(weights[bank + "low_hz_"].astype(np.float64))
    high = np.clip(
        low + _MIN_HZ + np.abs(weights[bank + "band_hz_"].astype(np.float64)), _MIN_HZ, _SAMPLE_RATE / 2
    )
    times, window = (weights[bank + name].reshape(1, -1).astype(np.float64) for name in ("n_", "window_"))
    even = (np.sin(high @ times) - np.sin(low @ times)) / (times / 2) * window
    odd = (np.cos(low @ times) - np.cos(high @ times)) / (times / 2) * window
    middle = 2 * (high - low)
    filters = [
        np.concatenate([even, middle, even[:, ::-1]], 1),
        np.concatenate([odd, np.zeros_like(middle), -odd[:, ::-1]], 1),
    ]
    return (np.concatenate(filters) / np.tile(middle, (2, 1))).astype(np.float32)[:, None]


def _lstm(graph: Graph, weights: Weights, layer: int) -> list[str]:
    """Return a layer's inputs in ONNX's gate order, with int8 weights in half the time."""

    def gates(name: str) -> npt.NDArray[np.float32]:
        into, forget, cell, out = np.split(weights[f"lstm.{name}"], 4)
        return np.concatenate([into, out, forget, cell])

    ends = [f"_l{layer}", f"_l{layer}_reverse"]
    into, into_scale = int8(np.stack([gates(f"weight_ih{end}").T for end in ends]))
    recurrent, recurrent_scale = int8(np.stack([gates(f"weight_hh{end}").T for end in ends]))
    biases = np.stack([np.concatenate([gates(f"bias_ih{end}"), gates(f"bias_hh{end}")]) for end in ends])
    # A constant of its own for each, which onnxruntime may replace (see `load_onnx`).
    into_zero, recurrent_zero = (graph.constant(np.zeros(into_scale.shape, np.int8)) for _ in range(2))
    scales = [graph.constant(into_scale), into_zero, graph.constant(recurrent_scale), recurrent_zero]
    values = [graph.constant(each) for each in (into, recurrent, biases)]
    return [*values, *[""] * 4, *scales]  # none of lengths, first states and peepholes


def _instance_norm(graph: Graph, weights: Weights, x: str, name: str) -> str:
    scale, bias = graph.constant(weights[f"{name}.weight"]), graph.constant(weights[f"{name}.bias"])
    return graph.add("InstanceNormalization", x, scale, bias, epsilon=_EPSILON)


def _conv(graph: Graph, weights: Weights, x: str, name: str, **attributes: Attribute) -> str:
    bias = f"{name}.bias"
    more = [graph.constant(weights[bias])] if bias in weights else []
    return graph.add("Conv", x, graph.constant(weights[f"{name}.weight"]), *more, **attributes)
