import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asr_server.channel import wire
from asr_server.channel.messages import Credit, LanguageDetected, Submit
from asr_server.channel.shared_memory import SharedMemoryReader, SharedMemoryWriter
from asr_server.core import ChunkId, DecodingOptions


def submit(samples: np.ndarray) -> Submit:
    options = DecodingOptions(language="de", temperatures=(0.0, 0.2))
    return Submit(ChunkId("request", 3, 1, 2), samples, options)


def test_a_large_array_rides_in_a_frame_of_its_own() -> None:
    message = submit(np.arange(16_000, dtype=np.float32))
    header, samples = wire.commands.encode(message)
    assert len(header) < 300
    assert memoryview(samples).nbytes == 64_000


def test_a_small_array_rides_inside_the_message() -> None:
    assert len(wire.commands.encode(submit(np.zeros(63, np.float32)))) == 1
    assert len(wire.commands.encode(submit(np.zeros(64, np.float32)))) == 2


@pytest.mark.parametrize("length", [0, 1, 63, 64, 480_000])
def test_every_message_comes_back_as_it_was(length: int) -> None:
    message = submit(np.random.default_rng(length).standard_normal(length).astype(np.float32))
    received = wire.commands.decode([bytes(frame) for frame in wire.commands.encode(message)])
    assert isinstance(received, Submit)
    assert (received.id, received.options) == (message.id, message.options)
    np.testing.assert_array_equal(received.samples, message.samples)


def test_an_array_with_strides_is_sent_in_its_own_order() -> None:
    received = wire.commands.decode(wire.commands.encode(submit(np.arange(1000, dtype=np.float32)[::-2])))
    assert isinstance(received, Submit)
    np.testing.assert_array_equal(received.samples, np.arange(1000, dtype=np.float32)[::-2])


def test_reading_and_writing_copy_nothing() -> None:
    samples = np.zeros(1000, np.float32)
    received = wire.commands.decode(wire.commands.encode(submit(samples)))
    assert isinstance(received, Submit)
    assert np.shares_memory(received.samples, samples)


def test_a_large_array_lies_in_shared_memory_where_there_is_room() -> None:
    writer = SharedMemoryWriter(1 << 16)
    reader = SharedMemoryReader(writer.fd)
    message = submit(np.arange(10_000, dtype=np.float32))
    for num_frames in (1, 2):  # the second one finds no room
        frames = wire.commands.encode(message, writer)
        assert len(frames) == num_frames
        received = wire.commands.decode(frames, reader)
        assert isinstance(received, Submit)
        np.testing.assert_array_equal(received.samples, message.samples)
    assert len(wire.commands.encode(submit(np.zeros(63, np.float32)), writer)) == 1
    assert writer.num_bytes_used == 40_960
    writer.close()


def test_events_keep_plain_ints_and_floats() -> None:
    for event in (Credit(7), LanguageDetected(ChunkId("r", 0), {"en": 0.75, "de": 0.25})):
        assert wire.events.decode(wire.events.encode(event)) == event


def test_what_is_no_message_is_refused() -> None:
    for nonsense in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Nonsense"}), msgspec.msgpack.encode([1])):
        with pytest.raises(wire.MalformedMessage):
            wire.commands.decode([nonsense])
    with pytest.raises(NotImplementedError, match="does not cross the wire"):
        wire.commands.encode(Submit(ChunkId("r", 0), object(), DecodingOptions()))  # type: ignore[arg-type]


NESTED: wire.Wire[Any] = wire.Wire(dict)


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", ">i2"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (7,), (33, 5), (2, 3, 40)])
def test_arrays_of_any_type_and_shape_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    received = NESTED.decode(NESTED.encode({"array": array}))["array"]
    assert (received.dtype, received.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(received, array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (60, 70)])
def test_tensors_of_any_type_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    for sent in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
        received = NESTED.decode(NESTED.encode({"tensor": sent}))["tensor"]
        assert received.dtype == dtype
        assert torch.equal(received, sent)


def test_arrays_stand_beside_plain_values_however_deep() -> None:
    sent = {"list": [1, 2.5, {"a": np.arange(100), "b": [np.float32(1.5), "text", None, b"raw"]}]}
    received = NESTED.decode(NESTED.encode(sent))
    np.testing.assert_array_equal(received["list"][2].pop("a"), np.arange(100))
    assert received == {"list": [1, 2.5, {"b": [1.5, "text", None, b"raw"]}]}


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="do not cross the wire"):
        NESTED.encode({"objects": np.array([object()] * 100)})


@pytest.mark.parametrize(
    "header",
    [
        {"type_name": "<f4", "shape": [4], "inline": b"123"},
        {"type_name": "<f4", "shape": [-1], "inline": b"1234"},
        {"type_name": "|O", "shape": [1], "inline": b"12345678"},
        {"type_name": "torch.Tensor", "shape": [1], "inline": b"1234"},
        {"type_name": "nonsense", "shape": [1], "inline": b"1234"},
        {"type_name": "<f4,(", "shape": [1], "inline": b"1234"},  # which numpy takes for Python
        {"type_name": "<f4", "shape": [1 << 62, 1 << 62], "inline": b""},
        {"type_name": "<f4", "shape": [1], "frame": 0},
        {"type_name": "<f4", "shape": [1], "frame": 9},
        {"type_name": "<f4", "shape": [1], "offset": 0},
        {"type_name": "<f4", "shape": [1]},
    ],
)
def test_an_array_whose_content_does_not_fit_is_refused(header: dict[str, Any]) -> None:
    names = ("type_name", "shape", "inline", "frame", "offset")
    body = msgspec.msgpack.encode([header.get(name) for name in names])
    message = msgspec.msgpack.encode({"array": msgspec.msgpack.Ext(wire.ARRAY, body)})
    with pytest.raises(wire.MalformedMessage):
        NESTED.decode([message])


def test_the_message_itself_is_no_array_of_its_own() -> None:
    """Its first frame is the message."""
    for size in range(20, 120):
        body = msgspec.msgpack.encode(["|u1", [size], None, 0, None])
        message = msgspec.msgpack.encode({"array": msgspec.msgpack.Ext(wire.ARRAY, body)})
        with pytest.raises(wire.MalformedMessage):
            NESTED.decode([message])


def test_ten_thousand_mutated_messages_are_read_or_refused() -> None:
    choose = random.Random(0)
    frames = wire.commands.encode(submit(np.arange(100, dtype=np.float32)))
    num_refused = 0
    for _ in range(10_000):
        header = bytearray(frames[0])
        for _ in range(choose.randrange(1, 4)):
            header[choose.randrange(len(header))] = choose.randrange(256)
        mutated = [bytes(header[: choose.randrange(1, len(header) + 1)]), *frames[1 : choose.randrange(1, 3)]]
        try:
            wire.commands.decode(mutated)
        except wire.MalformedMessage:
            num_refused += 1
    assert 1000 < num_refused < 10_000
