"""Make the ONNX file of CAM++, which embeds voices.

The network is 3D-Speaker's (`speakerlab/models/campplus`, Apache-2.0). Equal weights give equal bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asr_server.checkpoint.pickled import read_torch
from asr_server.machine import LARGEST_WITHOUT_VNNI
from asr_server.speakers.onnx_file import END, Attribute, Graph, Weights, int8

NUM_FEATURES, EMBEDDING_SIZE = 80, 192


class _Levels(NamedTuple):
    step: float
    zero: int  # the level of 0.0

    def constants(self, graph: Graph) -> list[str]:
        return [graph.constant(np.float32(self.step)), graph.constant(np.uint8(self.zero))]


# Between the first convolutions hardly a value is larger, by 160 stretches of speech; what is, is cut. Of
# bounds of 16 to 40, 28 keeps the embeddings most like those of float32 (their cosine is 0.993).
_LARGEST: Final = 28.0
_POSITIVE, _SIGNED = _Levels(_LARGEST / 255, 0), _Levels(2 * _LARGEST / 255, 128)
_DENSE_BLOCKS: Final = ((12, 1), (24, 2), (16, 2))  # layers, dilation
_EPSILON: Final = 1e-5  # of all norms


def convert_embedding(source: Path) -> bytes:
    """Convert: features [batch, num_frames, 80] in, voices [batch, 192] out.

    Layers are gated by means of the whole and of stretches. `pool` [num_stretches, num_positions] takes
    the means, `spread` distributes the gates, so none is computed a frame. Later products use int8, in
    half the time.
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
    kernel, bias = _folded(weights, conv, norm)
    values, scale = int8(kernel.reshape(len(kernel), -1).T, LARGEST_WITHOUT_VNNI)
    values = values.T.reshape(kernel.shape)
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
    gate = graph.add("Relu", graph.linear(weights, gate, f"{name}.cam_layer.linear1"))
    gate = graph.add("Sigmoid", graph.linear(weights, gate, f"{name}.cam_layer.linear2"))
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
            graph.constant([(tap - 2) * dilation if tap < 2 else END, (tap + 1) * size]),
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
    values, scale = int8(kernel)
    inputs = [x, graph.constant(values), graph.constant(scale), graph.constant(np.zeros(len(scale), np.int8))]
    return graph.add("DynamicQuantizeMatMul", *inputs, *([] if bias is None else [graph.constant(bias)]))


def _statistics(graph: Graph, x: str) -> str:
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


def _conv_bn(graph: Graph, weights: Weights, x: str, conv: str, norm: str, **attributes: Attribute) -> str:
    kernel, bias = _folded(weights, conv, norm)
    return graph.add("Conv", x, graph.constant(kernel), graph.constant(bias), **attributes)


def _folded(
    weights: Weights, conv: str, norm: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    scale, shift = _scale_and_shift(weights, norm)
    kernel = weights[f"{conv}.weight"]
    return kernel * scale.reshape(-1, *[1] * (kernel.ndim - 1)), shift


def _bn_relu(graph: Graph, weights: Weights, x: str, name: str) -> str:
    scale, shift = _scale_and_shift(weights, name)
    scaled = graph.add("Mul", x, graph.constant(scale))
    return graph.add("Relu", graph.add("Add", scaled, graph.constant(shift)))


def _scale_and_shift(weights: Weights, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    deviation = np.sqrt(weights[f"{name}.running_var"].astype(np.float64) + _EPSILON)
    scale = weights.get(f"{name}.weight", np.float32(1)) / deviation
    shift = weights.get(f"{name}.bias", np.float32(0)) - weights[f"{name}.running_mean"] * scale
    return scale.astype(np.float32), shift.astype(np.float32)
