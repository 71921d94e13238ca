import msgspec
import numpy as np
import pytest

from asr_server.core import ChunkId, Credit, DecodingOptions, LanguageDetected, Submit
from asr_server.transport import wire


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


def test_events_keep_plain_ints_and_floats() -> None:
    for event in (Credit(7), LanguageDetected(ChunkId("r", 0), {"en": 0.75, "de": 0.25})):
        assert wire.events.decode(wire.events.encode(event)) == event


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.commands.decode([msgspec.msgpack.encode({"type": "Nonsense"})])
    with pytest.raises(NotImplementedError, match="does not cross the wire"):
        wire.commands.encode(Submit(ChunkId("r", 0), object(), DecodingOptions()))  # type: ignore[arg-type]
