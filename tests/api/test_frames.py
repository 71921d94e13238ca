"""Large frames of a WebSocket become fragments, and the parser sees the same messages."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable

import pytest
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

from asr_server.api.frames import PIECE_BYTES, SMALL_BYTES, FrameCutter

MOST = 10 * PIECE_BYTES
MASK = b"\x01\x80\xfe\x37"


def frame(kind: Opcode, content: bytes, is_final: bool = True) -> bytes:
    """A frame of a client, whose random mask the library makes."""
    return Frame(kind, content, is_final).serialize(mask=True)


def parsed(parts: Iterable[bytes]) -> list[Frame]:
    parser = Protocol(Side.SERVER, state=State.OPEN, max_size=MOST)
    frames = []
    for part in parts:
        parser.receive_data(part)
        frames += [event for event in parser.events_received() if isinstance(event, Frame)]
        if parser.parser_exc is not None:
            raise parser.parser_exc
    return frames


def messages(frames: list[Frame]) -> list[tuple[Opcode, bytes]]:
    """Whole messages, and control frames where they come."""
    whole: list[tuple[Opcode, bytes]] = []
    kind, content = Opcode.TEXT, b""
    for each in frames:
        if each.opcode >= Opcode.CLOSE:
            whole.append((each.opcode, bytes(each.data)))
            continue
        if each.opcode is not Opcode.CONT:
            kind, content = each.opcode, b""
        content += each.data
        if each.fin:
            whole.append((kind, content))
    return whole


def stream(rng: random.Random) -> bytes:
    """Messages of many sizes, in one frame or several, with pings between them."""
    sent = b""
    for _ in range(6):
        sizes = [rng.choice((0, 1, 125, 126, 65_535, 65_536, 65_537, 2 * PIECE_BYTES + 3)) for _ in range(2)]
        kind = rng.choice((Opcode.TEXT, Opcode.BINARY))
        is_whole = rng.random() < 0.5
        sent += frame(kind, rng.randbytes(sizes[0]), is_whole) + frame(Opcode.PING, b"x")
        if not is_whole:
            sent += frame(Opcode.CONT, rng.randbytes(sizes[1]))
    return sent


def received_in(sent: bytes, sizes: Iterable[int]) -> Iterable[bytes]:
    at = 0
    for size in sizes:
        yield sent[at : at + size]
        at += size
    yield sent[at:]


@pytest.mark.parametrize("seed", range(20))
def test_messages_come_whole_however_the_bytes_arrive(seed: int) -> None:
    rng = random.Random(seed)
    sent = stream(rng)
    sizes = [rng.choice((1, 2, 3, 7, 1000, 100_000)) for _ in range(300)]
    cutter = FrameCutter(MOST)
    parts = [part for data in received_in(sent, sizes) for part in cutter.cut(data)]
    frames = parsed(parts)
    assert messages(frames) == messages(parsed([sent]))
    assert max(len(each.data) for each in frames) <= PIECE_BYTES
    assert max(map(len, parts)) < PIECE_BYTES + SMALL_BYTES


def test_a_frame_over_the_limit_is_refused_by_its_head() -> None:
    head = b"\x81\xff" + struct.pack("!Q", MOST + 1) + MASK
    with pytest.raises(PayloadTooBig):
        parsed(FrameCutter(MOST).cut(head))


def test_fragments_of_large_frames_count_to_the_limit_of_their_message() -> None:
    sent = frame(Opcode.TEXT, bytes(MOST - 1), False) + frame(Opcode.CONT, bytes(PIECE_BYTES + 1))
    with pytest.raises(PayloadTooBig):
        parsed(FrameCutter(MOST).cut(sent))


def test_the_rest_of_a_large_frame_is_dropped_when_nobody_reads_it() -> None:
    large, ping = frame(Opcode.TEXT, bytes(5 * PIECE_BYTES)), frame(Opcode.PING, b"x")
    cutter = FrameCutter(MOST)
    parts = [*cutter.cut(large[: 3 * PIECE_BYTES])]
    cutter.drops_rest = True
    frames = parsed([*parts, *cutter.cut(large[3 * PIECE_BYTES :] + ping)])
    assert sum(len(each.data) for each in frames[:-1]) == 3 * PIECE_BYTES
    assert (frames[-1].opcode, frames[-1].data) == (Opcode.PING, b"x")
