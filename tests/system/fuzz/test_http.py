"""Bytes that are nearly HTTP: each is answered or refused, and none is a fault of the server."""

import asyncio
import contextlib
import logging
import re

import httpx
import psutil
import pytest
from hypothesis.strategies import integers, one_of, sampled_from, tuples

from asr_server.api.upload import Form, UploadStore, read_form
from asr_server.errors import RequestError
from tests.conftest import Server
from tests.system.fuzz.fuzzing import answer_to, damaged, fuzz, fuzzing, pieces_of
from tests.unit.api.test_upload import BOUNDARY, FILE, Client, body, part

REQUEST = (
    b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
    b"content-type: multipart/form-data; boundary=b\r\nx-request-id: a\r\n\r\n"
    b'2b\r\n--b\r\ncontent-disposition: form-data; name="m"\r\n\r\n'
    b"3\r\n1\r\n\r\n5\r\n--b--\r\n0\r\nx: y\r\n\r\n"
)
LINES = (
    *(b"GET /health HTTP/1.1\r\n", b"POST /v1/audio/translations HTTP/1.0\r\n", b"OPTIONS * HTTP/1.1\r\n"),
    *(b"CONNECT a:1 HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /%ff?\xff=%00#x HTTP/1.1\r\n"),
    *(
        b"host: 127.0.0.1\r\n",
        b"content-length: 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 1e9\r\n",
    ),
    *(
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"expect: 100-continue\r\n",
    ),
    *(b"connection: close\r\n", b"connection: upgrade\r\n", b"upgrade: websocket\r\n", b"upgrade: h2c\r\n"),
    *(b"origin: null\r\n", b"authorization: Bearer \xff\r\n", b"x-forwarded-for: ,\r\n", b" folded\r\n"),
    *(b"content-type: multipart/form-data; boundary=b\r\n", b"content-type: a/b; x*=utf-8''%ff\r\n"),
    *(
        b"range: bytes=0-,-1,9-1\r\n",
        b"accept-encoding: *;q=x\r\n",
        b"x-request-id: \x80\r\n",
        b"cookie: =\r\n",
    ),
    *(b"\r\n", b"\n", b"0\r\n\r\n", b"5\r\nabcde\r\n"),
    *(b"ffffffffffffffff\r\n", b"1;x=y\r\nz\r\n", b"--b--\r\n"),
)


@fuzzing
def test_bytes_that_are_nearly_http_are_answered_or_refused(brisk_server: Server) -> None:
    url = httpx.URL(brisk_server.url)

    def check(data: bytes) -> None:
        answer = answer_to((url.host, url.port or 0), data)
        assert not re.search(rb"HTTP/1.1 500", answer), answer

    fuzz(one_of(damaged(REQUEST), pieces_of(*LINES)), check, psutil.Process(brisk_server.process.pid))


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
                        await read_form(request, form)
                    assert form.has_file

        bodies = one_of(damaged(WHOLE), pieces_of(*PIECES, most=40))
        examples = tuples(bodies, integers(1, 4096), sampled_from(TYPES))
        fuzz(examples, lambda example: runner.run(read(*example)), psutil.Process())
