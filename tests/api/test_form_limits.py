"""How much of each kind a form may have: the last that is taken, and the first that is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from itertools import count

import pytest

from asr_server.api.form import Form, ReadingTurns, read_form
from asr_server.api.upload import UploadStore
from asr_server.errors import InvalidValue, UploadTooLarge
from tests.api.test_form import BOUNDARY, FILE, Client, body, part, part_with_header

MIB = 1 << 20


async def taken(data: bytes, turns: ReadingTurns | None = None) -> Form:
    """Read a body that comes in one piece."""
    with closing(Form(MIB, UploadStore(16 * MIB))) as form:
        await read_form(Client(data, len(data)).request(), form, MIB, turns or ReadingTurns())
    return form


async def refusal(data: bytes) -> InvalidValue:
    with pytest.raises(InvalidValue) as caught:
        await taken(data)
    return caught.value


def marks(num: int) -> bytes:
    """A file with so many boundaries in all, the last one is the body's end."""
    return body(part("file", f"\r\n--{BOUNDARY}X".encode() * (num - 1)))


def header(num_bytes: int) -> bytes:
    return body(part_with_header(b"x" * 96, b"y" * (num_bytes - 96)), FILE)


BODIES: dict[str, tuple[Callable[[int], bytes], int, str | None]] = {
    "fields": (lambda num: body(FILE, *[part("a", b"1")] * num), 512, "a"),
    "the bytes of a name": (lambda num: body(FILE, part("n" * num, b"")), 256, None),
    "the bytes of a value": (lambda num: body(FILE, part("prompt", b"x" * num)), 65_536, "prompt"),
    "the bytes of a voice": (
        lambda num: body(FILE, part("known_speaker_references[]", b"x" * num)),
        MIB,
        "known_speaker_references[]",
    ),
    "the bytes of a header": (header, 4096, None),
    "boundaries": (marks, 528, None),
}


@pytest.mark.parametrize("what", BODIES)
async def test_a_form_has_so_many_and_no_more(what: str) -> None:
    make, most, param = BODIES[what]
    assert (await taken(make(most))).has_file
    assert (await refusal(make(most + 1))).param == param


@pytest.mark.parametrize(("beyond", "is_taken"), [(0, True), (1, False)])
async def test_a_body_has_six_mebibytes_beside_its_file(beyond: int, is_taken: bool) -> None:
    announced = Client(body(FILE)).request(content_length=str(7 * MIB + beyond))
    with closing(Form(MIB, UploadStore(MIB))) as form:
        if is_taken:
            await read_form(announced, form, MIB, ReadingTurns())
            assert form.has_file
        else:
            with pytest.raises(UploadTooLarge):
                await read_form(announced, form, MIB, ReadingTurns())


async def test_what_follows_the_end_of_a_body_counts_too() -> None:
    """A length need not be announced."""
    voices = [part(f"known_speaker_references{number}", b"x" * MIB) for number in range(7)]
    with pytest.raises(UploadTooLarge):
        await taken(body(FILE, *voices))


@pytest.mark.parametrize(("beyond", "is_taken"), [(0, True), (1, False)])
async def test_the_bytes_of_a_body_are_counted_as_they_come(beyond: int, is_taken: bool) -> None:
    voices = [part(f"known_speaker_references{number}", b"x" * MIB) for number in range(6)]
    rest = 7 * MIB + beyond - len(body(FILE, part("known_speaker_references", b""), *voices))
    whole = body(FILE, part("known_speaker_references", b"x" * rest), *voices)
    assert len(whole) == 7 * MIB + beyond
    if is_taken:
        assert len((await taken(whole)).fields) == 7
    else:
        with pytest.raises(UploadTooLarge):
            await taken(whole)


async def test_what_memory_has_no_room_for_is_on_the_disk_before_the_form_ends() -> None:
    store = UploadStore(0)
    data = body(part("file", bytes(300_000)))
    with closing(Form(MIB, store)) as form:
        await read_form(Client(data, 100_000).request(), form, MIB, ReadingTurns())
        assert (store.disk_bytes, store.memory_bytes) == (300_000, 0)


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((part("prompt", b"\xff"), FILE), "prompt"),
        ((FILE, part("prompt", b"\xff", '; filename="a"')), "prompt"),
        ((part("prompt", b"\xff", '; filename="a"'), FILE), "file"),
    ],
)
async def test_a_file_is_missing_where_another_field_was_sent_as_one_in_its_place(
    parts: tuple[bytes, ...], param: str
) -> None:
    assert (await refusal(body(*parts))).param == param


async def test_content_is_parsed_by_64_kilobytes_and_all_else_by_8(slice_sizes: list[int]) -> None:
    await taken(body(part("file", bytes(200_000), '; filename="a"')))
    assert slice_sizes[:3] == [8192, 65_536, 65_536]
    slice_sizes.clear()
    await refusal(FILE + f"--{BOUNDARY}".encode() + b" " * 100_000)
    assert max(slice_sizes) == 8192


class Turns(ReadingTurns):
    num_taken = 0

    async def next(self) -> None:
        self.num_taken += 1
        await super().next()


@pytest.mark.parametrize(("slice_s", "num_more"), [(0.0, 0), (0.0004, 2), (0.0011, 6)])
async def test_parsing_leaves_the_loop_to_others_after_a_millisecond(
    slice_s: float, num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six slices. The clock is read once a slice, and when the next turn begins."""
    turns, clock = Turns(), count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) * slice_s)
    await taken(body(*[part("a", b"x" * 8000)] * 6, FILE), turns)
    assert turns.num_taken == 3 + num_more
