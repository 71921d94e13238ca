"""Bodies that are nearly multipart, in pieces of any size: each is a form or a refusal."""

import asyncio
import contextlib
import logging

import psutil
import pytest
from hypothesis.strategies import integers, one_of, sampled_from, tuples

from asr_server.api.upload import Form, ReadingTurns, UploadStore, read_form
from asr_server.errors import RequestError
from tests.system.fuzz.fuzzing import damaged, fuzz, fuzzing, pieces_of
from tests.unit.api.test_upload_form import BOUNDARY, FILE, Client, body, part

WHOLE = body(part("model", b"m"), FILE, part("a[]", "é".encode()))
PIECES = (
    *(f"--{BOUNDARY}\r\n".encode(), f"--{BOUNDARY}--\r\n".encode(), f"\r\n--{BOUNDARY}".encode()),
    *(b"\r\n", b"\r", b"-", b" \t", b":", b"content-disposition: form-data; ", b'name="file"', b'name="a"'),
    *(
        b'; filename="\\"x"',
        b"; filename*=utf-8''%ff",
        b"name=a; name=b",
        b"\r\n\r\n",
        b"x" * 300,
        b"=;" * 200,
    ),
    *(b"content-transfer-encoding: base64\r\n", b"\xff\xfe", FILE, part("prompt", b"p"), part("", b"")),
)
TYPES = (
    f"multipart/form-data; boundary={BOUNDARY}",
    f'Multipart/Form-Data;charset=x; boundary="{BOUNDARY}"',
    "multipart/form-data; boundary=-",
)


@fuzzing
def test_bodies_that_are_nearly_multipart_are_read_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "python_multipart")  # pytest would keep a line for each
    with asyncio.Runner() as runner:

        async def read(data: bytes, piece: int, content_type: str) -> None:
            with contextlib.closing(Form(1 << 20, UploadStore(1 << 20))) as form:
                request = Client(data, piece, content_type).request()
                with contextlib.suppress(RequestError):
                    async with asyncio.timeout(20):
                        await read_form(request, form, ReadingTurns())
                    assert form.has_file

        bodies = one_of(damaged(WHOLE), pieces_of(*PIECES, most=40))
        examples = tuples(bodies, integers(1, 4096), sampled_from(TYPES))
        fuzz(examples, lambda example: runner.run(read(*example)), psutil.Process())
