"""Bytes that are nearly HTTP: each is answered or refused, and none is a fault of the server."""

import re

import httpx
import psutil
from hypothesis.strategies import one_of

from tests.conftest import Server
from tests.system.fuzz.fuzzing import answer_to, damaged, fuzz, fuzzing, pieces_of

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
