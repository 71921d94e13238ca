"""Write ONNX files with the few messages that a graph needs, always the same bytes.

The package onnx would be 18 MB for one conversion. Field numbers are onnx.proto's (IR version 9).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

END: Final = 2**31  # of a slice: as far as there is something
OPSET, IR_VERSION = 18, 9  # onnxruntime 1.20 reads them
_FLOAT, _UINT8, _INT8, _INT32, _INT64 = 1, 2, 3, 6, 7  # TensorProto.DataType
MICROSOFT: Final = "com.microsoft"  # the domain of onnxruntime's own operators
_MICROSOFTS: Final = ("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QLinearAdd")
_OPSETS: Final = ((b"", OPSET), (MICROSOFT.encode(), 1))
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5  # wire types of protocol buffers
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT, _ATTRIBUTE_STRING, _ATTRIBUTE_INTS = 1, 2, 3, 7

_DATA_TYPES: Final = {
    np.float32: _FLOAT,
    np.uint8: _UINT8,
    np.int8: _INT8,
    np.int32: _INT32,
    np.int64: _INT64,
}

Array: TypeAlias = npt.NDArray[np.float32 | np.uint8 | np.int8 | np.int32 | np.int64]
Weights: TypeAlias = Mapping[str, npt.NDArray[np.float32]]  # of a network, by their names
Attribute: TypeAlias = int | float | str | Sequence[int]
Dimension: TypeAlias = int | str  # a name where any size will do


class Graph:
    def __init__(self, inputs: Mapping[str, Sequence[Dimension]], output: Sequence[Dimension]) -> None:
        self._inputs, self._output = inputs, output
        self._nodes: list[bytes] = []
        self._constants: dict[str, Array] = {}

    def constant(self, values: npt.ArrayLike) -> str:
        array = np.asarray(values)
        name = f"constant_{len(self._constants)}"
        kind = array.dtype.type if array.dtype.type in _DATA_TYPES else np.float32
        self._constants[name] = np.array(array, kind, order="C")
        return name

    def add(self, op: str, *inputs: str, **attributes: Attribute) -> str:
        name = f"{op}_{len(self._nodes)}"
        domain = MICROSOFT if op in _MICROSOFTS else ""
        self._nodes.append(
            b"".join(
                [
                    *(_bytes(1, each.encode()) for each in inputs),
                    _bytes(2, name.encode()),
                    _bytes(4, op.encode()),
                    *(_bytes(5, _attribute(key, value)) for key, value in attributes.items()),
                    _bytes(7, domain.encode()),
                ]
            )
        )
        return name

    def linear(self, weights: Weights, x: str, name: str) -> str:
        kernel = weights[f"{name}.weight"]
        product = self.add("MatMul", x, self.constant(kernel.reshape(kernel.shape[:2]).T))
        return self.add("Add", product, self.constant(weights[f"{name}.bias"]))

    def serialize(self, result: str) -> bytes:
        self._nodes.append(_bytes(1, result.encode()) + _bytes(2, b"output") + _bytes(4, b"Identity"))
        graph = b"".join(
            [
                *(_bytes(1, node) for node in self._nodes),
                _bytes(2, b"graph"),
                *(_bytes(5, _tensor(name, values)) for name, values in self._constants.items()),
                *(_bytes(11, _value(name, shape)) for name, shape in self._inputs.items()),
                _bytes(12, _value("output", self._output)),
            ]
        )
        opsets = [_bytes(1, domain) + _integer(2, version) for domain, version in _OPSETS]
        return _integer(1, IR_VERSION) + _bytes(7, graph) + b"".join(_bytes(8, opset) for opset in opsets)


def int8(
    kernel: npt.NDArray[np.float32], largest: int = 127
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Quantize [..., inputs, outputs] to int8, with scales [..., outputs]."""
    scale = np.abs(kernel).max(axis=-2) / largest
    return np.round(kernel / scale[..., None, :]).astype(np.int8), scale


def _attribute(name: str, value: Attribute) -> bytes:
    match value:
        case int():
            content, kind = _integer(3, value), _ATTRIBUTE_INT
        case float():
            content, kind = _key(2, _FIXED32) + struct.pack("<f", value), _ATTRIBUTE_FLOAT
        case str():
            content, kind = _bytes(4, value.encode()), _ATTRIBUTE_STRING
        case _:
            content, kind = b"".join(_integer(8, each) for each in value), _ATTRIBUTE_INTS
    return _bytes(1, name.encode()) + content + _integer(20, kind)


def _tensor(name: str, values: Array) -> bytes:
    dims = b"".join(_integer(1, size) for size in values.shape)
    kind = _DATA_TYPES[values.dtype.type]
    return dims + _integer(2, kind) + _bytes(8, name.encode()) + _bytes(9, values.tobytes())


def _value(name: str, shape: Sequence[Dimension]) -> bytes:
    dims = b"".join(
        _bytes(1, _bytes(2, size.encode()) if isinstance(size, str) else _integer(1, size)) for size in shape
    )
    tensor = _integer(1, _FLOAT) + _bytes(2, dims)
    return _bytes(1, name.encode()) + _bytes(2, _bytes(1, tensor))


_UNSIGNED: Final = (1 << 64) - 1


def _varint(number: int) -> bytes:
    number &= _UNSIGNED
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, number: int) -> bytes:
    return _key(field, _VARINT) + _varint(number)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, _LENGTH) + _varint(len(content)) + content
