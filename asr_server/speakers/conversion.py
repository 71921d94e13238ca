"""Makes ONNX files of the two published models: who speaks when in ten seconds, and what a voice is like.

The networks are pyannote's segmentation-3.0 (`pyannote/audio/models/segmentation/PyanNet.py`, MIT; its
filters are asteroid-filterbanks' `ParamSincFB`) and 3D-Speaker's CAM++ (`speakerlab/models/campplus`,
Apache-2.0). Their weights are read by an unpickler that runs no code of the file; the same weights give the
same bytes. Used by `models.py` once, where they are fetched. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.readers import read_torch
from asr_server.speakers.onnx_file import Attribute, Graph

Weights: TypeAlias = Mapping[str, npt.NDArray[np.float32]]


class _Levels(NamedTuple):
    """What the 256 levels of a number in 8 bits stand for."""

    step: float
    zero: int  # the level of 0.0

    def constants(self, graph: Graph) -> list[str]:
        return [graph.constant(np.float32(self.step)), graph.constant(np.uint8(self.zero))]


NUM_CLASSES: Final = 7  # of the segmentation: nobody, each of three, each two of three
NUM_FILTERS, NUM_SEGMENTATION_FEATURES = 80, 60
NUM_FEATURES: Final = 80  # of the embedding
EMBEDDING_SIZE: Final = 192
_SAMPLE_RATE: Final = 16_000
_MIN_HZ: Final = 50.0  # of a sinc filter: of its lower edge, and of its width
_STRIDE: Final = 10  # samples between two values of the sinc filters
_POOLING: Final = 3
_LSTM_LAYERS, _LSTM_SIZE = 4, 128
_SLOPE: Final = 0.01  # of the leaky ReLU below zero
_END: Final = 2**31  # of a slice: as far as there is something
_EPSILON: Final = 1e-5  # of all norms
# Between CAM++'s first convolutions hardly a value is larger, by 160 stretches of speech; what is, is cut. Of
# bounds of 16 to 40, 28 keeps the embeddings most like those of float32 (their cosine is 0.993).
_LARGEST: Final = 28.0
_POSITIVE, _SIGNED = _Levels(_LARGEST / 255, 0), _Levels(2 * _LARGEST / 255, 128)
# Of their weights: without VNNI pairs of products are added in 16 bits, which would overflow with 8.
_LARGEST_IN_7_BITS: Final = 63
_DENSE_BLOCKS: Final = ((12, 1), (24, 2), (16, 2))  # CAM++'s: layers, dilation


def convert_filters(source: Path) -> bytes:
    """samples [batch, num_samples] in, [batch, 160, num_positions] out: what each of 80 sinc filters gives at
    most in 30 samples, then what its opposite does.

    The network takes magnitudes, of windows that have been brought to one mean and loudness. The larger of
    these two, brought there afterwards, is the same: windows that overlap can share the filters' work.
    """
    filters = _sinc_filters(read_torch(source, "state_dict"))
    graph = Graph({"samples": ["batch", "samples"]}, ["batch", 2 * NUM_FILTERS, "positions"])
    x = graph.add("Unsqueeze", "samples", graph.constant([1]))
    # As a convolution for each of the three values that are pooled: for large ones MaxPool is slow.
    kernel, axis = graph.constant(filters), graph.constant([2])
    values = []
    for place in range(_POOLING):
        start, left_out = place * _STRIDE, (_POOLING - 1 - place) * _STRIDE
        end = -left_out if left_out else _END
        moved = graph.add("Slice", x, graph.constant([start]), graph.constant([end]), axis)
        values.append(graph.add("Conv", moved, kernel, strides=[_POOLING * _STRIDE]))
    least = graph.add("Neg", graph.add("Min", *values))
    return graph.serialize(graph.add("Concat", graph.add("Max", *values), least, axis=1))


def convert_convolutions(source: Path) -> bytes:
    """filtered [batch, 160, num_positions] in, by the filters, with mean and variance [batch, 1, 1] of the
    window's samples; features [batch, 60, num_frames] out.
    """
    weights = read_torch(source, "state_dict")
    graph = Graph(
        {
            "filtered": ["batch", 2 * NUM_FILTERS, "positions"],
            "mean": ["batch", 1, 1],
            "variance": ["batch", 1, 1],
        },
        ["batch", NUM_SEGMENTATION_FEATURES, "frames"],
    )
    x = _magnitudes(graph, weights)
    for layer in range(3):
        if layer:
            x = _conv(graph, weights, x, f"sincnet.conv1d.{layer}")
            x = graph.add("MaxPool", x, kernel_shape=[_POOLING], strides=[_POOLING])
        x = graph.add("LeakyRelu", _instance_norm(graph, weights, x, f"sincnet.norm1d.{layer}"), alpha=_SLOPE)
    return graph.serialize(x)


def convert_lstm(source: Path) -> bytes:
    """features [batch, 60, num_frames] in, by the convolutions; log-probabilities of the classes
    [batch, num_frames, 7] out.
    """
    weights = read_torch(source, "state_dict")
    graph = Graph(
        {"features": ["batch", NUM_SEGMENTATION_FEATURES, "frames"]}, ["batch", "frames", NUM_CLASSES]
    )
    x = graph.add("Transpose", "features", perm=[2, 0, 1])  # time first, as ONNX's LSTM wants it
    for layer in range(_LSTM_LAYERS):
        lstm = _lstm(graph, weights, layer)
        x = graph.add("DynamicQuantizeLSTM", x, *lstm, hidden_size=_LSTM_SIZE, direction="bidirectional")
        x = graph.add("Transpose", x, perm=[0, 2, 1, 3])
        x = graph.add("Reshape", x, graph.constant([0, 0, 2 * _LSTM_SIZE]))
    for name in ("linear.0", "linear.1"):
        x = graph.add("LeakyRelu", _linear(graph, weights, x, name), alpha=_SLOPE)
    x = graph.add("LogSoftmax", _linear(graph, weights, x, "classifier"), axis=-1)
    return graph.serialize(graph.add("Transpose", x, perm=[1, 0, 2]))


def _magnitudes(graph: Graph, weights: Weights) -> str:
    """What the filters would give, without its sign, of the windows brought to one mean and loudness. What
    is added to the samples counts for each filter as the sum of its taps says.
    """
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
    """[80, 1, 251]: band-passes between learned edges, even ones, then odd ones."""
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
    """The inputs of a layer behind x. torch's gates are in, forget, cell, out; ONNX's are in, out, forget,
    cell. Weights are int8, with a scale for each output, which takes half the time of float32.
    """

    def gates(name: str) -> npt.NDArray[np.float32]:
        into, forget, cell, out = np.split(weights[f"lstm.{name}"], 4)
        return np.concatenate([into, out, forget, cell])

    ends = [f"_l{layer}", f"_l{layer}_reverse"]
    into, into_scale = _int8(np.stack([gates(f"weight_ih{end}").T for end in ends]))
    recurrent, recurrent_scale = _int8(np.stack([gates(f"weight_hh{end}").T for end in ends]))
    biases = np.stack([np.concatenate([gates(f"bias_ih{end}"), gates(f"bias_hh{end}")]) for end in ends])
    # A constant of its own for each, which onnxruntime may replace (see `load_onnx`).
    into_zero, recurrent_zero = (graph.constant(np.zeros(into_scale.shape, np.int8)) for _ in range(2))
    scales = [graph.constant(into_scale), into_zero, graph.constant(recurrent_scale), recurrent_zero]
    values = [graph.constant(each) for each in (into, recurrent, biases)]
    return [*values, *[""] * 4, *scales]  # none of lengths, first states and peepholes


def _int8(kernel: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """[..., inputs, outputs] as int8, and the scales [..., outputs] that it is to be multiplied with."""
    scale = np.abs(kernel).max(axis=-2) / 127
    return np.round(kernel / scale[..., None, :]).astype(np.int8), scale


def _instance_norm(graph: Graph, weights: Weights, x: str, name: str) -> str:
    scale, bias = graph.constant(weights[f"{name}.weight"]), graph.constant(weights[f"{name}.bias"])
    return graph.add("InstanceNormalization", x, scale, bias, epsilon=_EPSILON)


def _linear(graph: Graph, weights: Weights, x: str, name: str) -> str:
    """A linear layer, or a convolution over one position, which is the same."""
    kernel = weights[f"{name}.weight"]
    product = graph.add("MatMul", x, graph.constant(kernel.reshape(kernel.shape[:2]).T))
    return graph.add("Add", product, graph.constant(weights[f"{name}.bias"]))


def convert_embedding(source: Path) -> bytes:
    """features [batch, num_frames, 80] in, voices [batch, 192] out.

    A layer of CAM++ is gated by the mean of the whole and of a stretch of frames. The gate is the same all
    through a stretch: `pool` [num_stretches, num_positions] takes these means, `spread` brings what was made
    of them back, so that nothing of it is computed for each frame (`voices.py` makes both). Behind the first
    convolutions a row is a position: theirs are products with int8 weights, in half the time of float32.
    """
    weights = read_torch(source)
    graph = Graph(
        {
            "features": ["batch", "frames", NUM_FEATURES],
            "pool": ["stretches", "positions"],
            "spread": ["positions", "stretches"],
        },
        ["batch", EMBEDDING_SIZE],
    )
    x = graph.add("Unsqueeze", graph.add("Transpose", "features", perm=[0, 2, 1]), graph.constant([1]))
    x = graph.add("Relu", _conv_bn(graph, weights, x, "head.conv1", "head.bn1", pads=[1, 1, 1, 1]))
    x = graph.add("QuantizeLinear", x, *_POSITIVE.constants(graph))
    for layer in (1, 2):
        for block, stride in enumerate((2, 1)):
            x = _residual(graph, weights, x, f"head.layer{layer}.{block}", stride)
    x = _int8_conv(graph, weights, x, "head.conv2", "head.bn2", _POSITIVE, strides=[2, 1])
    x = graph.add("DequantizeLinear", x, *_POSITIVE.constants(graph))
    x = graph.add("Reshape", x, graph.constant([0, weights["xvector.tdnn.linear.weight"].shape[1], -1]))
    x = _conv_bn(
        graph, weights, x, "xvector.tdnn.linear", "xvector.tdnn.nonlinear.batchnorm", pads=[2, 2], strides=[2]
    )
    x = graph.add("Transpose", graph.add("Relu", x), perm=[0, 2, 1])  # [batch, num_positions, channels]
    for block, (num_layers, dilation) in enumerate(_DENSE_BLOCKS, start=1):
        for layer in range(1, num_layers + 1):
            new = _dense_layer(graph, weights, x, f"xvector.block{block}.tdnnd{layer}", dilation)
            x = graph.add("Concat", x, new, axis=2)
        x = _bn_relu(graph, weights, x, f"xvector.transit{block}.nonlinear.batchnorm")
        x = _int8_product(graph, x, weights[f"xvector.transit{block}.linear.weight"][:, :, 0].T)
    x = _bn_relu(graph, weights, x, "xvector.out_nonlinear.batchnorm")
    return graph.serialize(_embedding(graph, weights, _statistics(graph, x)))


def _residual(graph: Graph, weights: Weights, x: str, name: str, stride: int) -> str:
    """Of 8 bits in and out, as `_int8_conv`."""
    y = _int8_conv(graph, weights, x, f"{name}.conv1", f"{name}.bn1", _POSITIVE, strides=[stride, 1])
    y = _int8_conv(graph, weights, y, f"{name}.conv2", f"{name}.bn2", _SIGNED)
    levels = _POSITIVE
    if f"{name}.shortcut.0.weight" in weights:
        shortcut = f"{name}.shortcut.0", f"{name}.shortcut.1"
        x, levels = _int8_conv(graph, weights, x, *shortcut, _SIGNED, strides=[stride, 1]), _SIGNED
    terms = y, *_SIGNED.constants(graph), x, *levels.constants(graph)
    return graph.add("QLinearAdd", *terms, *_POSITIVE.constants(graph))


def _int8_conv(
    graph: Graph,
    weights: Weights,
    x: str,
    conv: str,
    norm: str,
    levels: _Levels,
    **attributes: Attribute,
) -> str:
    """A convolution with the batch norm behind it, of what has the levels _POSITIVE into other `levels`;
    where those are positive, a ReLU as well. Takes half the time of float32.
    """
    kernel, bias = _folded(weights, conv, norm)
    scale = np.abs(kernel).reshape(len(kernel), -1).max(axis=1) / _LARGEST_IN_7_BITS
    values = np.round(kernel / scale[:, None, None, None]).astype(np.int8)
    whole = np.round(bias / (scale * _POSITIVE.step)).astype(np.int32)
    weight = graph.constant(values), graph.constant(scale), graph.constant(np.zeros(len(kernel), np.int8))
    inputs = x, *_POSITIVE.constants(graph), *weight, *levels.constants(graph), graph.constant(whole)
    pad = kernel.shape[-1] // 2
    return graph.add("QLinearConv", *inputs, pads=[pad] * 4, **attributes)


def _dense_layer(graph: Graph, weights: Weights, x: str, name: str, dilation: int) -> str:
    x = _bn_relu(graph, weights, x, f"{name}.nonlinear1.batchnorm")
    scale, shift = _scale_and_shift(weights, f"{name}.nonlinear2.batchnorm")
    inner = weights[f"{name}.linear1.weight"][:, :, 0].T * scale
    x = graph.add("Relu", _int8_product(graph, x, inner, shift))
    gate = graph.add("MatMul", "pool", x)
    gate = graph.add("Relu", _linear(graph, weights, gate, f"{name}.cam_layer.linear1"))
    gate = graph.add("Sigmoid", _linear(graph, weights, gate, f"{name}.cam_layer.linear2"))
    # What the three taps of the convolution make of every position, then moved by the dilation and added.
    taps = weights[f"{name}.cam_layer.linear_local.weight"]  # [32, 128, 3]
    size, num_taps = taps.shape[0], taps.shape[2]
    moved = _int8_product(graph, x, np.concatenate([taps[:, :, tap].T for tap in range(num_taps)], axis=1))
    moved = graph.add("Pad", moved, graph.constant([0, dilation, 0, 0, dilation, 0]))
    parts = [
        graph.add(
            "Slice",
            moved,
            graph.constant([tap * dilation, tap * size]),
            graph.constant([(tap - 2) * dilation if tap < 2 else _END, (tap + 1) * size]),
            graph.constant([1, 2]),
        )
        for tap in range(num_taps)
    ]
    local = graph.add("Add", graph.add("Add", parts[0], parts[1]), parts[2])
    return graph.add("Mul", local, graph.add("MatMul", "spread", gate))


def _int8_product(
    graph: Graph,
    x: str,
    kernel: npt.NDArray[np.float32],
    bias: npt.NDArray[np.float32] | None = None,
) -> str:
    """x [..., inputs] times kernel [inputs, outputs]; x is quantized as it comes."""
    values, scale = _int8(kernel)
    inputs = [x, graph.constant(values), graph.constant(scale), graph.constant(np.zeros(len(scale), np.int8))]
    return graph.add("DynamicQuantizeMatMul", *inputs, *([] if bias is None else [graph.constant(bias)]))


def _statistics(graph: Graph, x: str) -> str:
    """[batch, 2 * channels]: each channel's mean and standard deviation, with the divisor n - 1."""
    mean = graph.add("ReduceMean", x, graph.constant([1]), keepdims=1)
    squares = graph.add("ReduceSumSquare", graph.add("Sub", x, mean), graph.constant([1]), keepdims=1)
    length = graph.add("Gather", graph.add("Shape", x), graph.constant([1]), axis=0)
    divisor = graph.add("Sub", graph.add("Cast", length, to=1), graph.constant([1.0]))
    deviation = graph.add("Sqrt", graph.add("Div", squares, divisor))
    return graph.add("Concat", mean, deviation, axis=2)


def _embedding(graph: Graph, weights: Weights, x: str) -> str:
    linear = weights["xvector.dense.linear.weight"]
    scale, shift = _scale_and_shift(weights, "xvector.dense.nonlinear.batchnorm")
    x = graph.add("Squeeze", x, graph.constant([1]))
    x = graph.add("MatMul", x, graph.constant((linear[:, :, 0] * scale[:, None]).T))
    return graph.add("Add", x, graph.constant(shift))


def _conv(graph: Graph, weights: Weights, x: str, name: str, **attributes: Attribute) -> str:
    bias = f"{name}.bias"
    more = [graph.constant(weights[bias])] if bias in weights else []
    return graph.add("Conv", x, graph.constant(weights[f"{name}.weight"]), *more, **attributes)


def _conv_bn(graph: Graph, weights: Weights, x: str, conv: str, norm: str, **attributes: Attribute) -> str:
    """A convolution with the batch norm behind it."""
    kernel, bias = _folded(weights, conv, norm)
    return graph.add("Conv", x, graph.constant(kernel), graph.constant(bias), **attributes)


def _folded(
    weights: Weights, conv: str, norm: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The weights of a convolution with the batch norm behind it, and the bias."""
    scale, shift = _scale_and_shift(weights, norm)
    kernel = weights[f"{conv}.weight"]
    return kernel * scale.reshape(-1, *[1] * (kernel.ndim - 1)), shift


def _bn_relu(graph: Graph, weights: Weights, x: str, name: str) -> str:
    scale, shift = _scale_and_shift(weights, name)
    scaled = graph.add("Mul", x, graph.constant(scale))
    return graph.add("Relu", graph.add("Add", scaled, graph.constant(shift)))


def _scale_and_shift(weights: Weights, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """What a batch norm does to each channel."""
    deviation = np.sqrt(weights[f"{name}.running_var"].astype(np.float64) + _EPSILON)
    scale = weights.get(f"{name}.weight", np.float32(1)) / deviation
    shift = weights.get(f"{name}.bias", np.float32(0)) - weights[f"{name}.running_mean"] * scale
    return scale.astype(np.float32), shift.astype(np.float32)
