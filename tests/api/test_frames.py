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


# -- To the byte --


def head_of(first: int, length: int, mask: bytes = MASK) -> bytes:
    second = 0x80 if mask else 0
    if length < 126:
        return bytes((first, second | length)) + mask
    if length < 1 << 16:
        return bytes((first, second | 126)) + length.to_bytes(2, "big") + mask
    return bytes((first, second | 127)) + length.to_bytes(8, "big") + mask


def cut(data: bytes) -> bytes:
    return b"".join(FrameCutter(MOST).cut(data))


@pytest.mark.parametrize(
    ("first", "length", "mask", "is_cut"),
    [
        (0x81, PIECE_BYTES, MASK, False),
        (0x81, PIECE_BYTES + 1, MASK, True),
        (0x82, PIECE_BYTES + 1, MASK, True),
        (0x80, PIECE_BYTES + 1, MASK, True),
        (0x87, PIECE_BYTES + 1, MASK, True),
        (0x88, PIECE_BYTES + 1, MASK, False),  # a close, which has no fragments
        (0x81, PIECE_BYTES + 1, b"", False),
        (0x81, MOST, MASK, True),
        (0x81, MOST + 1, MASK, False),
        (0x81, 125, MASK, False),
        (0x81, 126, MASK, False),
        (0x81, 0, MASK, False),
    ],
)
def test_a_large_frame_of_content_is_cut_and_any_other_is_left(
    first: int, length: int, mask: bytes, is_cut: bool
) -> None:
    sent = head_of(first, length, mask) + bytes(length)
    following = head_of(0x89, 1) + b"x"
    came = cut(sent + following)
    assert came.endswith(following)
    assert (came == sent + following) != is_cut


def test_fragments_have_the_mask_and_only_the_last_is_final() -> None:
    length = 2 * PIECE_BYTES + 3
    content = random.Random(0).randbytes(length)
    came = cut(head_of(0x81, length) + content)
    heads: list[bytes] = []
    at = 0
    for kind, size in ((0x01, PIECE_BYTES), (0x00, PIECE_BYTES), (0x80, 3)):
        head = bytes((kind, 0xFF)) + size.to_bytes(8, "big") + MASK
        assert came[at : at + len(head)] == head
        assert came[at + len(head) :][:size] == content[len(heads) * PIECE_BYTES :][:size]
        at += len(head) + size
        heads.append(head)
    assert at == len(came)
    unfinished = cut(head_of(0x01, PIECE_BYTES + 1) + bytes(PIECE_BYTES + 1))
    assert unfinished[14 + PIECE_BYTES] == 0x00


def test_small_frames_are_parsed_by_two_kilobytes() -> None:
    ping = head_of(0x89, 2) + b"xy"
    parts = list(FrameCutter(MOST).cut(ping * 1000))
    assert b"".join(parts) == ping * 1000
    assert {len(part) for part in parts[:-1]} == {SMALL_BYTES} == {2048}
    assert list(FrameCutter(MOST).cut(b"")) == []


@pytest.mark.parametrize("at", range(1, 14))
def test_a_head_may_come_in_two_parts(at: int) -> None:
    sent = head_of(0x81, PIECE_BYTES + 1) + bytes(PIECE_BYTES + 1)
    cutter = FrameCutter(MOST)
    first = b"".join(cutter.cut(sent[:at]))
    assert first == b""
    assert first + b"".join(cutter.cut(sent[at:])) == cut(sent)


def test_what_is_dropped_ends_with_its_frame() -> None:
    length = 3 * PIECE_BYTES
    cutter = FrameCutter(MOST)
    cutter.drops_rest = True
    small = head_of(0x81, 5) + b"small"
    came = b"".join(cutter.cut(head_of(0x81, length) + bytes(length) + small))
    assert came == bytes((0x01, 0xFF)) + PIECE_BYTES.to_bytes(8, "big") + MASK + bytes(PIECE_BYTES) + small


@pytest.mark.parametrize("size", [70_000, 100_000])
def test_what_is_dropped_is_as_long_as_its_frame_however_the_bytes_arrive(size: int) -> None:
    length = 3 * PIECE_BYTES
    small = head_of(0x81, 5) + b"small"
    sent = small + head_of(0x81, length) + bytes(length) + small
    cutter = FrameCutter(MOST)
    cutter.drops_rest = True
    came = b"".join(part for at in range(0, len(sent), size) for part in cutter.cut(sent[at : at + size]))
    fragment = bytes((0x01, 0xFF)) + PIECE_BYTES.to_bytes(8, "big") + MASK + bytes(PIECE_BYTES)
    assert came == small + fragment + small
