import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from asr_server.api import upload as form_module
from asr_server.api.upload import Form, ReadingTurns, UploadStore, read_form
from asr_server.errors import InvalidAudio, InvalidValue, RequestError, UploadTooLarge

BOUNDARY = "limit"
LIMIT = 1000
MEMORY_LIMIT = 1 << 20


def part(name: str, value: bytes, more: str = "") -> bytes:
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
        + value
        + b"\r\n"
    )


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", b"sound", '; filename="a.wav"')


class Client:
    """Sends a body piece by piece, and counts how much of it was taken."""

    def __init__(
        self, data: bytes, piece: int = 64, content_type: str | None = None, first_piece: int | None = None
    ) -> None:
        self.num_taken = 0
        self._data = data
        self._piece, self._first_piece = piece, first_piece or piece
        self._type = content_type or f"multipart/form-data; boundary={BOUNDARY}"

    async def receive(self) -> Message:
        piece = self._piece if self.num_taken else self._first_piece
        data = self._data[self.num_taken : self.num_taken + piece]
        self.num_taken += len(data)
        return {"type": "http.request", "body": data, "more_body": self.num_taken < len(self._data)}

    def request(self, **headers: str) -> Request:
        raw = [(b"content-type", self._type.encode())]
        raw += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "headers": raw}, self.receive)


@pytest.fixture
async def form() -> AsyncIterator[Form]:
    form = Form(LIMIT, UploadStore(MEMORY_LIMIT))
    yield form
    form.close()


async def read(form: Form, data: bytes, piece: int = 64, first_piece: int | None = None) -> None:
    await read_form(Client(data, piece, first_piece=first_piece).request(), form, ReadingTurns())


async def contents(form: Form) -> bytes:
    source = await form.upload.source()
    source.seek(0)
    return source.read()


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_fields_and_file_arrive_however_they_are_cut(form: Form, piece: int) -> None:
    data = b"\r\n--limi" + bytes(range(256))
    parts = (part("model", "é".encode()), part("file", data, '; filename="x"'), part("a[]", b"1"))
    await read(form, body(*parts, part("a[]", b"")), piece)
    assert form.fields == [("model", "é"), ("a[]", "1"), ("a[]", "")]
    assert await contents(form) == data


def part_with_header(name: bytes, value: bytes) -> bytes:
    line = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="model"\r\n'.encode()
    return line + name + b": " + value + b"\r\n\r\nbase\r\n"


async def test_a_length_announced_over_the_limit_is_refused_before_it_arrives(form: Form) -> None:
    client = Client(body(FILE))
    with pytest.raises(UploadTooLarge):
        await read_form(client.request(content_length=str(10**9)), form, ReadingTurns())
    assert client.num_taken == 0


async def test_a_body_that_grows_without_end_beside_the_file_is_refused(form: Form) -> None:
    piece, most = 10_000, LIMIT + form_module.MAX_OVERHEAD_BYTES
    client = Client(b"x" * 2 * most + body(FILE), piece)
    with pytest.raises((UploadTooLarge, InvalidValue)):
        await read_form(client.request(), form, ReadingTurns())
    assert client.num_taken <= most + piece


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (body(FILE, FILE), "file"),
        (body(part("model", b"m")), "file"),
        (body(FILE, part("prompt", b"\xff")), "prompt"),
        (body(FILE)[:-8], None),
        (body(FILE)[:30], None),
        (b"", None),
        (b"not multipart at all", None),
        (body(part("prompt", b"\xff"), FILE), "prompt"),
        (f"--{BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n--{BOUNDARY}--\r\n".encode(), None),
    ],
)
async def test_a_form_that_cannot_be_is_refused(form: Form, data: bytes, param: str | None) -> None:
    with pytest.raises(InvalidValue) as caught:
        await read(form, data, piece=1000)
    assert caught.value.param == param


@pytest.mark.parametrize("content", [b"\xff\xfb" * 10, b"x" * (form_module.MAX_VALUE_BYTES + 1)])
async def test_a_recording_in_another_field_is_told_which_one_is_missing(form: Form, content: bytes) -> None:
    with pytest.raises(InvalidValue, match="'file' is missing: a file was sent as 'audio'") as caught:
        await read(form, body(part("audio", content, '; filename="a.mp3"')), piece=1000)
    assert caught.value.param == "file"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"content_type": "application/json"}, "multipart/form-data"),
        ({"content_type": "multipart/form-data"}, "multipart/form-data"),
        ({"content_type": "multipart/form-data; boundary="}, "multipart/form-data"),
        ({"content_type": f"multipart/form-data; boundary={'x' * 300}"}, "boundary is too long"),
        ({"content_encoding": "gzip"}, "Content-Encoding 'gzip'"),
        ({"content_encoding": "x" * 81}, f"Content-Encoding '{'x' * 80}': send"),
    ],
)
async def test_a_body_that_is_no_form_is_refused(form: Form, headers: dict[str, str], told: str) -> None:
    client = Client(body(FILE), content_type=headers.pop("content_type", None))
    with pytest.raises(InvalidValue, match=told):
        await read_form(client.request(**headers), form, ReadingTurns())


@given(data=st.data())
@settings(max_examples=200, deadline=None)
async def test_no_body_whatever_brings_anything_but_a_form_or_a_refusal(data: st.DataObject) -> None:
    whole = body(part("model", b"m"), FILE, part("a[]", b"1"))
    cut = data.draw(st.integers(0, len(whole)))
    junk = data.draw(st.binary(max_size=40))
    skip = data.draw(st.integers(0, 40))
    form = Form(LIMIT, UploadStore(MEMORY_LIMIT))
    with contextlib.suppress(RequestError):
        await read(form, whole[:cut] + junk + whole[cut + skip :], data.draw(st.integers(1, 300)))
        assert form.has_file
    form.close()


async def test_a_file_made_of_what_looks_like_boundaries_is_refused_early(form: Form) -> None:
    client = Client(body(part("file", f"\r\n--{BOUNDARY}X".encode() * 100_000)), piece=10_000)
    with pytest.raises(InvalidValue, match="boundaries"):
        await read_form(client.request(), form, ReadingTurns())
    assert client.num_taken <= 10_000


async def test_a_piece_that_takes_long_to_parse_leaves_the_loop_to_others_meanwhile(form: Form) -> None:
    padded = FILE + f"--{BOUNDARY}".encode() + b" " * (1 << 20)  # the parser looks at each by itself
    rounds = 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_rounds())
    with pytest.raises(InvalidValue):
        await read(form, padded, piece=len(padded))
    counting.cancel()
    assert rounds > 20


MIB = 1 << 20


def header(num_bytes: int) -> bytes:
    return body(part_with_header(b"x" * 96, b"y" * (num_bytes - 98)), FILE)  # ": " is between


@pytest.mark.parametrize(
    ("make", "most", "param"),
    [
        (lambda num: body(FILE, *[part("a", b"1")] * num), form_module.MAX_FIELDS, "a"),
        (lambda num: body(FILE, part("n" * num, b"")), form_module.MAX_NAME_BYTES, None),
        (lambda num: body(FILE, part("prompt", b"x" * num)), form_module.MAX_VALUE_BYTES, "prompt"),
        (
            lambda num: body(FILE, part("known_speaker_references[]", b"x" * num)),
            form_module.MAX_LONG_BYTES,
            "known_speaker_references[]",
        ),
        (header, form_module.MAX_HEADER_BYTES, None),
    ],
    ids=["fields", "name", "value", "voice", "header"],
)
async def test_a_form_is_bounded_in_all(make: Callable[[int], bytes], most: int, param: str | None) -> None:
    with contextlib.closing(Form(MIB, UploadStore(16 * MIB))) as form:
        await read(form, make(most), piece=MIB)
        assert form.has_file
    with contextlib.closing(Form(MIB, UploadStore(16 * MIB))) as form:
        with pytest.raises(InvalidValue) as caught:
            await read(form, make(most + 1), piece=MIB)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("speech.wav", "curl sends a file by an @, file=@speech.wav."),
        ("https://example.com/a.mp3", "send the recording itself."),
    ],
)
async def test_a_path_in_place_of_the_file_is_told_of_curls_at(form: Form, text: str, hint: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        await read(form, body(part("file", text.encode())))
    assert caught.value.param == "file"
    assert caught.value.message == f"'file' is the text '{text}' and no recording: {hint}"


async def test_an_empty_file_is_no_audio(form: Form) -> None:
    with pytest.raises(InvalidAudio, match="empty"):
        await read(form, body(part("file", b"", '; filename="a.wav"')))


async def test_uploads_of_many_clients_leave_each_round_of_the_event_loop_short() -> None:
    turns, memory = ReadingTurns(), UploadStore(1 << 30)
    clients = [Client(body(part("file", bytes(2000), '; filename="a.wav"'))) for _ in range(50)]
    with contextlib.ExitStack() as closing_all:
        forms = [closing_all.enter_context(contextlib.closing(Form(4 * LIMIT, memory))) for _ in clients]
        both = zip(clients, forms, strict=True)
        reading = asyncio.gather(*(read_form(own.request(), form, turns) for own, form in both))
        read_in_a_round = []
        while not reading.done():
            before = sum(client.num_taken for client in clients)
            await asyncio.sleep(0)
            read_in_a_round.append(sum(client.num_taken for client in clients) - before)
        await reading
    assert max(read_in_a_round) <= 2 * 64  # a turn may be given while the one before is being used
    assert all(form.upload.num_bytes == 2000 for form in forms)


async def test_an_upload_that_is_given_up_while_it_waits_holds_nobody_up() -> None:
    turns = ReadingTurns()
    waiting = [asyncio.ensure_future(turns.next()) for _ in range(10)]
    await asyncio.sleep(0)
    for each in waiting[:9]:
        each.cancel()
    await asyncio.wait_for(waiting[9], timeout=60)
    await asyncio.wait_for(turns.next(), timeout=60)
