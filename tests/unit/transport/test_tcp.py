"""What only the ends for several hosts have: keys, strangers, connections that break."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from asr_server.annexes.ray.tcp import (
    MAX_COMMAND_BYTES,
    MAX_LOG_LINE_CHARS,
    TcpEngineClient,
    TcpEngineServer,
    make_curve_keys,
)
from asr_server.core import ChunkId, DecodingOptions
from asr_server.transport import wire
from asr_server.transport.messages import Cancel, Credit, LogLine, Submit
from asr_server.transport.zeromq import Address, CurveKeys
from tests.unit.transport.test_connection import connected, next_events

REFUSED = "wrong or missing key"


@pytest.fixture
async def client() -> AsyncIterator[TcpEngineClient]:
    client = TcpEngineClient("127.0.0.1")
    yield client
    client.close()


class Lost:
    """What a replica's end is given to call."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()

    async def wait(self) -> bool:
        return await asyncio.to_thread(self.event.wait, 30)


@asynccontextmanager
async def serving(address: Address) -> AsyncIterator[tuple[TcpEngineServer, Lost]]:
    lost = Lost()
    server = TcpEngineServer(address, on_lost=lost)
    try:
        yield server, lost
    finally:
        server.close()


async def until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in caplog.text:
            await asyncio.sleep(0.02)


def keys_of(client: TcpEngineClient, which: str) -> CurveKeys | None:
    """What a stranger may hold."""
    right, other = client.address.keys, make_curve_keys()[0]
    assert right is not None
    match which:
        case "no keys":
            return None
        case "another server's keys":
            return other
        case "keys of his own":
            return replace(other, peer=right.peer)
    raise AssertionError(which)


@contextmanager
def stranger(client: TcpEngineClient, which: str) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Sockets for events and commands that go on trying to connect."""
    context = zmq.Context()
    events, commands = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for end, endpoint in ((events, client.address.events), (commands, client.address.commands)):
        if keys := keys_of(client, which):
            end.curve_publickey, end.curve_secretkey = keys.public.encode(), keys.secret.encode()
            end.curve_serverkey = keys.peer.encode()
        end.reconnect_ivl = 10
        end.connect(endpoint)
    try:
        yield events, commands
    finally:
        context.destroy(linger=0)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["no keys", "another server's keys", "keys of his own"])
async def test_a_stranger_gets_nothing_reaches_nobody_and_is_logged_once(
    client: TcpEngineClient, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stranger(client, which) as (events, commands):
        events.send_multipart(wire.encode(Credit(99)))
        await until_logged(caplog, REFUSED)
        with pytest.raises(zmq.Again):
            client.send(Cancel("a"))  # nobody is there to get it
        async with serving(client.address) as (server, _):
            await connected(client, server)  # and not what the stranger sent
            client.send(Cancel("a"))
            assert await asyncio.to_thread(server.receive, 30.0) == [Cancel("a")]
        assert not commands.poll(timeout=200)
    assert caplog.text.count(REFUSED) == 1


async def test_other_protocols_do_no_harm(client: TcpEngineClient, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = client.address.events.removeprefix("tcp://").rpartition(":")
    server = TcpEngineServer(client.address, on_lost=Lost())
    await connected(client, server)
    for content in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        b"\xff" + bytes(8) + b"\x7f\x03" + b"\xff" * 60,
    ):
        with socket.create_connection((host, int(port))) as other, suppress(OSError):  # thrown out early
            other.sendall(content)
            other.shutdown(socket.SHUT_WR)
    await until_logged(caplog, REFUSED)
    await connected(client, server)
    server.close()


class Relay:
    """Stands between a replica and the commands that the client sends it; can break that connection."""

    def __init__(self, client: TcpEngineClient) -> None:
        self._client = client
        self.seen = bytearray()
        self.ended = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.wait_for(self.ended.wait(), 30)

    @property
    def address(self) -> Address:
        port = self._server.sockets[0].getsockname()[1]
        return replace(self._client.address, commands=f"tcp://127.0.0.1:{port}")

    def break_connection(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._client.address.commands.removeprefix("tcp://").rpartition(":")
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, upstream_writer]
        await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        self.ended.set()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen.extend(data)
                writer.write(data)
            writer.close()
            await writer.wait_closed()


async def test_what_crosses_cannot_be_read_on_the_way(client: TcpEngineClient) -> None:
    """A relay between the ends sees every byte, and nothing of the request."""
    async with Relay(client) as relay, serving(relay.address) as (server, _):
        await connected(client, server)
        client.send(Submit(ChunkId("secret-request", 0), np.zeros(10_000, np.float32), DecodingOptions()))
        assert len(await asyncio.to_thread(server.receive, 30.0)) == 1
        assert len(relay.seen) > 40_000
        assert b"secret-request" not in relay.seen
        assert bytes(1000) not in relay.seen


async def test_a_replica_learns_that_the_server_is_gone() -> None:
    client = TcpEngineClient("127.0.0.1")
    async with serving(client.address) as (server, lost):
        await connected(client, server)
        assert not lost.event.is_set()
        client.close()
        assert await lost.wait()


async def test_a_replica_learns_that_nobody_listens_or_lets_it_in(client: TcpEngineClient) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        refused = replace(client.address, keys=keys_of(client, "keys of his own"))
        for address in (replace(client.address, events=nowhere, commands=nowhere), refused):
            async with serving(address) as (_, lost):
                assert await lost.wait()


async def test_a_connection_that_broke_is_not_made_again(client: TcpEngineClient) -> None:
    """What was under way on it may be lost, so that the replica has to begin anew."""
    async with Relay(client) as relay, serving(relay.address) as (server, lost):
        await connected(client, server)
        relay.break_connection()
        assert await lost.wait()


async def test_a_message_longer_than_any_command_ends_the_connection(client: TcpEngineClient) -> None:
    async with serving(client.address) as (server, lost):
        await connected(client, server)
        client.send(Submit(ChunkId("a", 0), np.zeros(MAX_COMMAND_BYTES // 4, np.float32), DecodingOptions()))
        assert await lost.wait()
        assert server.receive(wait_s=0.0) == []


async def test_an_address_that_this_machine_has_not_is_told() -> None:
    with pytest.raises(OSError, match="assign"):
        TcpEngineClient("192.0.2.77")


async def test_keys_are_fresh_and_stay_out_of_what_is_logged(client: TcpEngineClient) -> None:
    other = TcpEngineClient("127.0.0.1")
    assert client.address.keys is not None
    assert other.address.keys is not None
    assert client.address.keys.secret != other.address.keys.secret
    assert client.address.keys.secret not in repr(client.address)
    logging.getLogger(__name__).info("%s", client.address)
    other.close()


async def test_log_lines_reach_the_server_cut_and_end_with_the_replica(client: TcpEngineClient) -> None:
    server = TcpEngineServer(client.address, on_lost=Lost())
    await connected(client, server)
    handler = server.log_handler
    logging.root.addHandler(handler)
    logging.getLogger("replica").warning("it is warm")
    logging.getLogger("replica").warning("x" * 30_000)
    lines: list[str] = []
    while len(lines) < 2:
        lines += [event.text for event in await next_events(client) if isinstance(event, LogLine)]
    assert lines[0] == "it is warm"
    assert len(lines[1]) == MAX_LOG_LINE_CHARS
    server.close()
    assert handler not in logging.root.handlers


async def test_a_replica_that_ends_in_order_has_lost_no_connection(client: TcpEngineClient) -> None:
    async with serving(client.address) as (server, lost):
        await connected(client, server)
    assert not lost.event.is_set()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
async def test_an_address_of_ipv6_is_taken() -> None:
    client = TcpEngineClient("::1")
    async with serving(client.address) as (server, _):
        await connected(client, server)
    client.close()
