"""Writes asr_server/models/silero-vad/detector.onnx: Silero's network with every convolution as one product.

    python tools/make_voice_detector.py        (needs the packages silero-vad, for its weights, and onnx)

A frame's convolutions cover four positions, so little that onnxruntime spends its time between them. As
matrices of whole frames the same weights take a third of the time; probabilities differ by rounding
(`tests/unit/audio/test_voice.py` compares them with the package's own graph).
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent.parent))

from asr_server.audio.voice import DETECTOR, HALF_WINDOW, STATE_SHAPE

Array: TypeAlias = npt.NDArray[np.float32]
NUM_BINS = HALF_WINDOW + 1  # of the spectrum, zero included
OPSET, IR_VERSION = 18, 9  # onnxruntime 1.20 reads them


def main() -> None:
    package = find_spec("silero_vad")
    if package is None or package.origin is None:
        raise SystemExit("pip install silero-vad")
    source = onnx.load(Path(package.origin).parent / "data" / "silero_vad_16k_sequence.onnx")
    weights = {each.name: numpy_helper.to_array(each) for each in source.graph.initializer}
    constants = _matrices(weights) | _shapes()
    graph = helper.make_graph(
        _nodes(),
        "silero-vad",
        [_values("even", "rows", HALF_WINDOW), _values("odd", "rows", HALF_WINDOW), *_state("h", "c")],
        [_values("probabilities", "frames"), *_state("next_h", "next_c")],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    DETECTOR.write_bytes(model.SerializeToString())
    print(f"{DETECTOR}: {DETECTOR.stat().st_size:,} bytes")


def _matrices(weights: dict[str, Array]) -> dict[str, Array]:
    """The four convolutions see positions 0 to 3 of a frame, of which the second and the third leave every
    other one: 4, 2, 1 and 1 remain. The first is two products of three positions each, for it is the widest.
    """
    first, second, third, fourth = (weights[f"encoder.{number}.weight"] for number in range(4))
    biases = [weights[f"encoder.{number}.bias"] for number in range(4)]
    return {
        **_spectrum(weights["stft.forward_basis_buffer"][:, 0].T),
        "first_half": _as_matrix(first, range(3), range(2), stride=1),
        "second_half": _as_matrix(first, range(1, 4), range(2, 4), stride=1),
        "first_bias": np.tile(biases[0], 2),
        "second": _as_matrix(second, range(4), range(2), stride=2),
        "second_bias": np.tile(biases[1], 2),
        "third": _as_matrix(third, range(2), range(1), stride=2),
        "third_bias": biases[2],
        "fourth": _as_matrix(fourth, range(1), range(1), stride=1),
        "fourth_bias": biases[3],
        "lstm_input": weights["onnx::LSTM_209"],
        "lstm_recurrent": weights["onnx::LSTM_210"],
        "lstm_bias": weights["onnx::LSTM_211"],
        "output": weights["output.weight"][0],
        "output_bias": weights["output.bias"],
    }


def _spectrum(basis: Array) -> dict[str, Array]:
    """Cosines for the window's even part, sines for its odd one, from [256, 129 + 129].

    Sample n and its mirror 256 - n share their weights (but for the sines' sign), so that a product with
    their sum or difference does with half of the rows. Sample 0 weighs nothing, sample 128 is its own mirror.
    """
    cosines, sines = basis[1 : HALF_WINDOW + 1, :NUM_BINS].copy(), basis[1 : HALF_WINDOW + 1, NUM_BINS:]
    cosines[-1] /= 2
    return {"cosines": cosines, "sines": sines}


def _as_matrix(weight: Array, inputs: Sequence[int], outputs: Sequence[int], stride: int) -> Array:
    """[len(inputs) * channels, len(outputs) * channels] of a convolution's [out, in, 3], padded by 1."""
    num_out, num_in, num_taps = weight.shape
    matrix = np.zeros((len(inputs), num_in, len(outputs), num_out), np.float32)
    for column, output in enumerate(outputs):
        for tap in range(num_taps):
            position = output * stride + tap - 1
            if position in inputs:
                matrix[inputs.index(position), :, column] = weight[:, :, tap].T
    return matrix.reshape(len(inputs) * num_in, len(outputs) * num_out)


def _shapes() -> dict[str, npt.NDArray[np.int64]]:
    shapes = {
        "per_frame": [-1, 4 * NUM_BINS],
        "sequence": [-1, 1, 128],
        "flat": [-1, 128],
        "line": [-1],
        "axis": [1],
        "position_0": [0],
        "position_1": [NUM_BINS],
        "position_3": [3 * NUM_BINS],
        "position_4": [4 * NUM_BINS],
    }
    return {name: np.array(value, np.int64) for name, value in shapes.items()}


def _nodes() -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("MatMul", ["even", "cosines"], ["real"]),  # [4 * frames, 129]
        node("MatMul", ["odd", "sines"], ["imaginary"]),
        node("Mul", ["real", "real"], ["real_power"]),
        node("Mul", ["imaginary", "imaginary"], ["imaginary_power"]),
        node("Add", ["real_power", "imaginary_power"], ["power"]),
        node("Sqrt", ["power"], ["magnitude"]),
        node("Reshape", ["magnitude", "per_frame"], ["spectrum"]),  # [frames, 4 * 129]
        node("Slice", ["spectrum", "position_0", "position_3", "axis"], ["positions_0_to_2"]),
        node("Slice", ["spectrum", "position_1", "position_4", "axis"], ["positions_1_to_3"]),
        node("Gemm", ["positions_0_to_2", "first_half", "first_bias"], ["x0_to_1"]),
        node("Gemm", ["positions_1_to_3", "second_half", "first_bias"], ["x2_to_3"]),
        node("Concat", ["x0_to_1", "x2_to_3"], ["x1"], axis=1),
        node("Relu", ["x1"], ["y1"]),
        node("Gemm", ["y1", "second", "second_bias"], ["x2"]),
        node("Relu", ["x2"], ["y2"]),
        node("Gemm", ["y2", "third", "third_bias"], ["x3"]),
        node("Relu", ["x3"], ["y3"]),
        node("Gemm", ["y3", "fourth", "fourth_bias"], ["x4"]),
        node("Relu", ["x4"], ["y4"]),
        node("Reshape", ["y4", "sequence"], ["steps"]),
        node(
            "LSTM",
            ["steps", "lstm_input", "lstm_recurrent", "lstm_bias", "", "h", "c"],
            ["hidden", "next_h", "next_c"],
            hidden_size=STATE_SHAPE[-1],
        ),
        node("Reshape", ["hidden", "flat"], ["x5"]),
        node("Relu", ["x5"], ["y5"]),
        node("Gemm", ["y5", "output", "output_bias"], ["x6"]),
        node("Sigmoid", ["x6"], ["y6"]),
        node("Reshape", ["y6", "line"], ["probabilities"]),
    ]


def _values(name: str, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _state(*names: str) -> list[onnx.ValueInfoProto]:
    return [_values(name, *STATE_SHAPE) for name in names]


if __name__ == "__main__":
    main()
