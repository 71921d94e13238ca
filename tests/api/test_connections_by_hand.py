"""The bounds of each connection, to the byte and the tick, on a clock of the test's own."""

from __future__ import annotations

import logging
import math

import pytest

from asr_server import metrics
from asr_server.api.upload import Upload
from asr_server.config import MIB
from tests.api.hand_line import CHUNKED, GET, POST, UPLOAD, line, settle


def get_of(num_bytes: int) -> bytes:
    head, end = GET[:-2] + b"x: ", b"\r\n\r\n"
    return head + b"y" * (num_bytes - len(head + end)) + end


# -- Headers --


@pytest.mark.parametrize("size", [2000, 1, 600])
@pytest.mark.parametrize(("num_bytes", "status"), [(1024, 200), (1025, 431)])
async def test_headers_have_so_many_bytes_however_they_are_cut(
    size: int, num_bytes: int, status: int
) -> None:
    protocol, wire = line().connect()
    data = get_of(num_bytes)
    for at in range(0, len(data), size):
        protocol.data_received(data[at : at + size])
    await settle()
    assert wire.statuses == [status]
    assert wire.was_closed == (status == 431)


async def test_each_request_has_the_whole_room_for_its_headers() -> None:
    protocol, wire = line().connect()
    for _ in range(3):
        protocol.data_received(get_of(700))
        await settle()
    protocol.data_received(get_of(700) * 3)
    await settle()
    assert wire.statuses == [200] * 6
    protocol.data_received(get_of(700)[:-1])
    protocol.data_received(b"y" * 326)
    assert wire.statuses[-1] == 431


@pytest.mark.parametrize(("num_headers", "status"), [(128, 200), (129, 431)])
async def test_a_request_has_so_many_headers(num_headers: int, status: int) -> None:
    protocol, wire = line(max_header_bytes=65536).connect()
    protocol.data_received(GET[:-2] + b"x: y\r\n" * (num_headers - 1) + b"\r\n")
    await settle()
    assert wire.statuses == [status]


async def test_headers_are_waited_for_so_many_ticks_from_the_start_of_each_request() -> None:
    here = line()
    protocol, wire = here.connect()
    await here.loop.pass_s(2.9)
    protocol.data_received(GET)
    await settle()
    await here.loop.pass_s(100.1)  # between requests nothing is waited for
    protocol.data_received(GET[:10])
    await here.loop.pass_s(2.9)
    assert wire.statuses == [200]
    await here.loop.pass_s(0.2)
    assert wire.statuses == [200, 408]
    assert b"No whole request within 3 seconds: --header-timeout-s" in wire.written


async def test_eight_requests_may_be_sent_ahead_of_their_replies() -> None:
    for num_ahead, statuses in ((8, [200] * 9), (9, [200] * 9 + [400])):
        here = line()
        here.app.may_answer.clear()
        protocol, wire = here.connect()
        protocol.data_received(GET)
        await settle()
        for _ in range(num_ahead):
            protocol.data_received(GET)
        assert wire.statuses == []
        here.app.may_answer.set()
        await settle()
        await settle()
        assert wire.statuses == statuses


async def test_nothing_behind_a_request_that_is_refused_is_read() -> None:
    here = line()
    here.app.may_answer.clear()
    protocol, wire = here.connect()
    protocol.data_received(GET + b"no HTTP\r\n\r\n" + GET)
    assert wire.is_paused
    protocol.data_received(GET)
    here.app.may_answer.set()
    await settle()
    assert wire.statuses == [200, 400]
    assert wire.was_closed
    assert len(here.app.scopes) == 1


async def test_a_refusal_is_a_whole_reply_with_an_id_and_is_counted_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api")
    counter = metrics.requests.labels("other", "400")
    before = counter._value.get()
    protocol, wire = line().connect()
    protocol.data_received(b"no HTTP\r\n\r\n")
    head, _, body = wire.written.partition(b"\r\n\r\n")
    fields = dict(row.lower().split(": ", 1) for row in head.decode().splitlines()[1:])
    assert fields["content-length"] == str(len(body))
    assert fields["connection"] == "close"
    assert fields["x-content-type-options"] == "nosniff"
    assert fields["x-request-id"].startswith("req_")
    assert counter._value.get() == before + 1
    (logged,) = caplog.messages
    assert logged == "closed the connection of ('10.0.0.1', 4000): Invalid HTTP request received."


async def test_what_is_no_handshake_of_tls_is_sent_no_reply() -> None:
    protocol, wire = line(ssl_certfile="server.pem").connect()
    protocol.data_received(b"no HTTP\r\n\r\n")
    assert (wire.was_aborted, wire.written) == (True, b"")


# -- Bodies --


def chunks(count: int) -> bytes:
    return b"1\r\nx\r\n" * count


@pytest.mark.parametrize(("num_chunks", "is_refused"), [(4161, False), (4162, True)])
async def test_a_read_may_bring_so_many_chunks_of_a_byte(num_chunks: int, is_refused: bool) -> None:
    """4096, and one more for every 64 bytes of the body."""
    protocol, wire = line().connect()
    protocol.data_received(CHUNKED)
    protocol.data_received(chunks(num_chunks))
    assert wire.statuses == [400] * is_refused


@pytest.mark.parametrize(("num_chunks", "is_refused"), [(4152, False), (4153, True)])
async def test_chunks_behind_headers_that_fill_their_room_are_counted_once(
    num_chunks: int, is_refused: bool
) -> None:
    protocol, wire = line().connect()
    rest = chunks(10)
    head = CHUNKED[:-2] + b"x: " + b"y" * (1024 - len(CHUNKED) - 5 - len(rest)) + b"\r\n\r\n"
    assert len(head + rest) == 1024
    protocol.data_received(head + rest)
    protocol.data_received(chunks(num_chunks))
    assert wire.statuses == [400] * is_refused


async def test_a_chunk_in_each_read_is_no_fault_of_the_client() -> None:
    protocol, wire = line().connect()
    protocol.data_received(CHUNKED)
    protocol.data_received(chunks(4161))
    for _ in range(200):
        protocol.data_received(chunks(1))
    assert wire.statuses == []
    for _ in range(10):
        protocol.data_received(chunks(2))
    assert wire.statuses == [400]
    assert b"chunks have less than 64 bytes" in wire.written


async def test_the_chunks_of_each_request_are_counted_from_none() -> None:
    protocol, wire = line().connect()
    for _ in range(3):
        protocol.data_received(CHUNKED)
        protocol.data_received(chunks(4000) + b"0\r\n\r\n")
        await settle()
    assert wire.statuses == [200] * 3
    assert wire.written.count(b"4000") == 3


@pytest.mark.parametrize(("num_bytes", "statuses"), [(1024, []), (1025, [431])])
async def test_what_frames_a_body_has_the_room_of_headers(num_bytes: int, statuses: list[int]) -> None:
    protocol, wire = line().connect()
    protocol.data_received(CHUNKED)
    for _ in range(2):  # bytes of the body give the room back
        protocol.data_received(b"1;x=" + b"y" * 596)
        protocol.data_received(b"\r\nz\r\n")
    protocol.data_received(b"1;x=" + b"y" * 596)
    protocol.data_received(b"y" * (num_bytes - 600))
    assert wire.statuses == statuses


async def test_a_body_at_the_least_rate_is_read_and_a_silence_uses_the_grace_up() -> None:
    here = line()
    protocol, wire = here.connect()
    protocol.data_received(UPLOAD)
    for _ in range(10):
        protocol.data_received(b"x" * 100)
        await here.loop.pass_s(1.0)
    assert wire.statuses == []
    await here.loop.pass_s(1.0)
    assert wire.statuses == [408]
    assert b"less than 100 bytes a second" in wire.written
    assert b"grown with what uploads hold" not in wire.written


async def test_a_body_that_is_refused_behind_a_request_is_never_answered_as_one() -> None:
    here = line()
    here.app.may_answer.clear()
    protocol, wire = here.connect()
    protocol.data_received(GET + CHUNKED + b"no number\r\n")
    assert wire.statuses == []
    here.app.may_answer.set()
    await settle()
    assert wire.statuses == [200, 400]
    assert wire.was_closed
    assert [scope["method"] for scope in here.app.scopes] == ["GET"]


@pytest.mark.parametrize(("waits_s", "statuses"), [(1.9, []), (2.1, [408])])
async def test_what_comes_fast_is_no_credit_beyond_the_grace(waits_s: float, statuses: list[int]) -> None:
    here = line()
    protocol, wire = here.connect()
    protocol.data_received(UPLOAD + b"x" * 50_000)
    await here.loop.pass_s(waits_s)
    assert wire.statuses == statuses


async def test_the_least_rate_is_higher_while_the_disk_of_uploads_is_full() -> None:
    here = line()
    upload = Upload(MIB * 9, here.uploads)
    for _ in range(2):
        upload.add(bytes(MIB))
        await upload.spill_to_disk()
    assert here.uploads.rate_factor == 2
    protocol, wire = here.connect()
    protocol.data_received(UPLOAD)
    await here.loop.pass_s(1.0)
    protocol.data_received(b"x" * 150)
    await here.loop.pass_s(1.0)
    assert wire.statuses == []
    await here.loop.pass_s(1.0)
    assert b"less than 200 bytes a second" in wire.written
    assert b"grown with what uploads hold of --max-upload-disk-bytes" in wire.written
    upload.close()


async def test_a_client_that_waits_for_the_server_is_not_slow() -> None:
    here = line()
    here.app.may_read.clear()
    asking, asking_wire = here.connect()
    asking.data_received(POST + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n")
    sending, sending_wire = here.connect()
    sending.data_received(UPLOAD + b"x" * 70_000)
    await settle()
    assert sending_wire.is_paused
    assert sending.bytes_per_s == math.inf
    await here.loop.pass_s(50.0)
    assert (asking_wire.statuses, sending_wire.statuses) == ([], [])


async def test_the_rate_of_a_client_is_of_the_last_ticks() -> None:
    here = line(client_grace_s=100.0)
    protocol, _ = here.connect()
    assert protocol.bytes_per_s == math.inf
    protocol.data_received(UPLOAD)
    rates = []
    for num_bytes in (1000, 0, 0, 1000):
        protocol.data_received(b"x" * num_bytes)
        await here.loop.pass_s(1.0)
        rates.append(protocol.bytes_per_s)
    assert rates == pytest.approx([1000, 800, 640, 712])


@pytest.mark.parametrize(("num_bytes", "is_slow"), [(399, True), (400, False)])
async def test_a_client_below_four_times_the_least_rate_is_slow(num_bytes: int, is_slow: bool) -> None:
    here = line()
    protocol, _ = here.connect()
    protocol.data_received(UPLOAD)
    assert not protocol.is_slow
    protocol.data_received(b"x" * num_bytes)
    await here.loop.pass_s(1.0)
    assert protocol.is_slow == is_slow


# -- Replies --


async def test_a_reply_that_is_read_at_the_least_rate_goes_on_and_one_that_is_not_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="asr_server.api")
    here = line()
    protocol, wire = here.connect()
    protocol.data_received(GET)
    await settle()
    for num_unsent in range(3000, 1000, -100):
        wire.num_unsent = num_unsent
        await here.loop.pass_s(1.0)
    assert protocol.bytes_per_s == 100
    assert not wire.was_aborted
    await here.loop.pass_s(1.0)
    assert wire.was_aborted
    assert caplog.messages == [
        "closed the connection of ('10.0.0.1', 4000): it does not read its reply",
    ]


async def test_a_reply_that_was_read_whole_gives_the_next_one_its_grace() -> None:
    here = line()
    protocol, wire = here.connect()
    protocol.data_received(GET)
    await settle()
    for num_unsent in (1000, 1000, 0, 1000, 1000):
        wire.num_unsent = num_unsent
        await here.loop.pass_s(1.0)
        assert not wire.was_aborted
    await here.loop.pass_s(1.0)
    assert wire.was_aborted
