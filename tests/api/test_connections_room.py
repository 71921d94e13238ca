"""Who makes room for a new connection, on a clock of the test's own."""

from __future__ import annotations

from asr_server.api.connections import BoundedHttpProtocol
from asr_server.api.websockets import BoundedWebSocketProtocol
from tests.api.hand_line import GET, UPLOAD, Line, Wire, line, settle


async def replying(here: Line, address: str = "10.0.0.1") -> tuple[BoundedHttpProtocol, Wire]:
    here.app.may_answer.clear()
    protocol, wire = here.connect(address)
    protocol.data_received(GET)
    await settle()
    return protocol, wire


async def idle(here: Line) -> Wire:
    protocol, wire = here.connect()
    protocol.data_received(GET)
    await settle()
    assert protocol.is_idle
    return wire


async def sending(here: Line, num_bytes: int, address: str) -> tuple[BoundedHttpProtocol, Wire]:
    protocol, wire = here.connect(address)
    protocol.data_received(UPLOAD)
    protocol.data_received(b"x" * num_bytes)
    await settle()
    return protocol, wire


async def test_idle_connections_make_room_all_at_once() -> None:
    here = line(max_connections=3)
    wires = [await idle(here) for _ in range(3)]
    protocol, wire = here.connect()
    assert [each.was_closed for each in wires] == [True] * 3
    protocol.data_received(GET)
    await settle()
    assert not here.app.scopes[-1]["state"]["over_connection_limit"]
    assert (wire.statuses, wire.was_closed) == ([200], False)


async def test_the_longest_silent_makes_room_but_none_of_the_last_tick_before_slow_ones() -> None:
    here = line(max_connections=2, header_timeout_s=100.0, client_grace_s=100.0)
    _, first = here.connect()
    await here.loop.pass_s(1.5)
    _, second = here.connect()
    await here.loop.pass_s(0.5)
    _, third = here.connect()
    assert [each.was_closed for each in (first, second, third)] == [True, False, False]
    await here.loop.pass_s(1.0)
    here.connect()
    assert [each.was_closed for each in (second, third)] == [True, False]


async def test_slow_uploads_make_room_before_those_that_have_just_connected() -> None:
    here = line(max_connections=3, header_timeout_s=100.0, client_grace_s=100.0)
    slower = [await sending(here, num_bytes, "10.0.0.2") for num_bytes in (50, 10)]
    await here.loop.pass_s(1.0)
    assert [protocol.is_slow for protocol, _ in slower] == [True, True]
    _, newest = here.connect()
    await here.loop.pass_s(0.1)
    here.connect()
    assert [wire.statuses for _, wire in slower] == [[], [408]]
    assert b"this connection's body arrives slowly, at 10 B/s" in slower[1][1].written
    assert b"All connections are taken: --max-connections" in slower[1][1].written
    here.connect()
    assert slower[0][1].statuses == []  # the last slow one of an address keeps its place
    assert newest.was_closed


async def test_of_several_addresses_the_one_with_most_slow_connections_makes_room() -> None:
    here = line(max_connections=5, client_grace_s=100.0)
    pair = [await sending(here, 0, "10.0.0.2") for _ in range(2)]
    crowd = [await sending(here, num_bytes, "10.0.0.3") for num_bytes in (100, 50, 200)]
    await here.loop.pass_s(1.0)
    await replying(here)
    assert [len(wire.statuses) for _, wire in (*pair, *crowd)] == [0, 0, 0, 1, 0]


async def test_a_reply_that_waits_for_its_reader_makes_room_without_a_further_word() -> None:
    here = line(max_connections=2, client_grace_s=100.0)
    crowd = [await replying(here, "10.0.0.2")]
    await here.loop.pass_s(0.5)
    crowd.append(await replying(here, "10.0.0.2"))
    for _, wire in crowd:
        wire.num_unsent = 1000
    await here.loop.pass_s(2.0)
    assert all(protocol.is_slow for protocol, _ in crowd)
    here.connect()
    assert [wire.was_aborted for _, wire in crowd] == [True, False]
    assert crowd[0][1].written == b""


async def test_beyond_the_limit_64_connections_are_kept_for_probes_and_marked() -> None:
    here = line(max_connections=2)
    wires = [(await replying(here))[1] for _ in range(66)]
    assert not any(wire.is_closing() for wire in wires)
    marks = [scope["state"].get("over_connection_limit", False) for scope in here.app.scopes]
    assert marks == [False] * 2 + [True] * 64
    _, one_more = here.connect()
    assert one_more.was_aborted


async def test_a_connection_that_is_lost_ticks_no_more() -> None:
    here = line()
    protocol, wire = here.connect()
    assert len(here.loop.waiting) == 1
    protocol.connection_lost(None)
    assert here.loop.waiting == []
    assert not here.server.connections
    assert wire.was_closed


async def test_a_handshake_hands_the_connection_over_without_a_tick() -> None:
    here = line()
    protocol, wire = here.connect()
    handshake = (
        b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    )
    key = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    protocol.data_received(handshake + key)
    assert here.loop.waiting == []
    assert isinstance(wire.protocol, BoundedWebSocketProtocol)
    await settle()


async def test_an_address_is_the_clients() -> None:
    protocol, _ = line().connect("10.1.2.3")
    assert protocol.address == "10.1.2.3"
