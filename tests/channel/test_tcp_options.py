"""What bounds a connection between hosts: the options of its sockets, and the lines of its log."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import zmq

from asr_server.channel.messages import Credit, LogLine
from asr_server.channel.tcp import LogHandler, TcpEngineClient, TcpEngineServer, make_curve_keys
from tests.channel.test_tcp import Lost

# A host that is gone is noticed by its kernel's silence: 4 s, then 3 times 2 s.
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 4,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 10_000,
}
MIB = 1 << 20


@pytest.fixture
async def ends() -> AsyncIterator[tuple[TcpEngineClient, TcpEngineServer]]:
    client = TcpEngineClient("127.0.0.1")
    server = TcpEngineServer(client.address, on_lost=Lost())
    yield client, server
    server.close()
    client.close()


async def test_both_ends_notice_a_lost_host_and_bound_messages_and_handshakes(
    ends: tuple[TcpEngineClient, TcpEngineServer],
) -> None:
    client, server = ends
    common = KEEPALIVE | {zmq.HANDSHAKE_IVL: 5000, zmq.IPV6: 0}
    for socket in (client._events, client._commands):
        wanted = common | {zmq.MAXMSGSIZE: 16 * MIB, zmq.CURVE_SERVER: 1, zmq.ZAP_ENFORCE_DOMAIN: 1}
        assert {option: socket.getsockopt(option) for option in wanted} == wanted
        assert socket.zap_domain == b"replicas"
    for socket in (server._events, server._commands):
        wanted = common | {zmq.MAXMSGSIZE: 64 * MIB, zmq.RECONNECT_IVL: -1, zmq.CONNECT_TIMEOUT: 10_000}
        assert {option: socket.getsockopt(option) for option in wanted} == wanted


async def test_an_address_of_ipv6_is_taken() -> None:
    client = TcpEngineClient("::1")
    assert client.address.events.startswith("tcp://[::1]:")
    server = TcpEngineServer(client.address, on_lost=Lost())
    server.send(Credit(1))
    assert await client.receive() == Credit(1)
    server.close()
    client.close()


async def test_lines_of_the_log_reach_the_server_cut_and_end_with_the_replica(
    ends: tuple[TcpEngineClient, TcpEngineServer],
) -> None:
    client, server = ends
    server.send(Credit(1))
    assert await client.receive() == Credit(1)
    handler = server.log_handler()
    assert isinstance(handler, LogHandler)
    assert handler._socket.getsockopt(zmq.SNDHWM) == 1000, "lines are dropped before memory is"
    assert len(server._monitors) == 2, "a lost line ends no replica"
    assert server._watch.daemon
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.root.addHandler(handler)
    logging.getLogger("a replica").warning("x" * 20_001)
    logging.getLogger("a replica").error("second")
    assert [await client.receive(), await client.receive()] == [LogLine("x" * 20_000), LogLine("second")]
    server.close()
    assert handler not in logging.root.handlers
    handler.emit(logging.makeLogRecord({"msg": "too late"}))  # loses the line, and harms nobody


def test_a_log_is_closed_between_two_lines_of_other_threads() -> None:
    """A ZeroMQ socket that two threads use at once aborts the process."""
    could_write: list[bool] = []

    def write() -> None:
        assert handler.lock is not None
        could_write.append(handler.lock.acquire(blocking=False))
        if could_write[0]:
            handler.lock.release()

    class Socket:
        def close(self, linger: int) -> None:
            other = threading.Thread(target=write)
            other.start()
            other.join()

    handler = LogHandler(Socket())  # type: ignore[arg-type]
    handler.close()
    assert could_write == [False]


def monitored(event: int, endpoint: bytes = b"tcp://host:1") -> list[bytes]:
    """The frames of an event as ZeroMQ's monitors send them."""
    return [struct.pack("=hi", event, 0), endpoint]


async def test_the_first_refusal_alone_is_logged(
    ends: tuple[TcpEngineClient, TcpEngineServer], caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = ends
    failed, accepted = zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_ACCEPTED
    arriving = [monitored(each, b"tcp://%d" % n) for n, each in enumerate((accepted, failed, failed))]

    class Monitor:
        async def recv_multipart(self) -> list[bytes]:
            return arriving.pop(0)

    with pytest.raises(IndexError):
        await client._log_first_refusal(Monitor())  # type: ignore[arg-type]
    assert caplog.messages == ["refused on tcp://1: somebody without the key of this connection"]


def test_a_connection_counts_as_lost_until_the_replica_closes_it_itself() -> None:
    """And other events never do."""
    context, lost = zmq.Context(), threading.Event()
    events, theirs = (context.socket(zmq.PAIR) for _ in range(2))
    events.bind("inproc://events")
    theirs.connect("inproc://events")
    asked: list[bool] = []

    class Server:
        _monitors: ClassVar = [theirs]

        @property
        def _closing(self) -> bool:
            asked.append(not asked)
            return asked[-1]

    called: list[bool] = []

    def on_lost() -> None:
        called.append(True)
        lost.set()

    watch = threading.Thread(target=TcpEngineServer._call_when_lost, args=(Server(), on_lost))
    watch.start()
    for event in (zmq.EVENT_CONNECTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_DISCONNECTED):
        events.send_multipart(monitored(event))
    assert lost.wait(60)
    events.close(linger=0)
    context.term()
    watch.join()
    assert (asked, called) == ([True, False], [True])


async def test_a_replica_that_closes_its_end_waits_for_its_watch() -> None:
    client = TcpEngineClient("127.0.0.1")
    server = TcpEngineServer(client.address, on_lost=Lost())
    watch, joined = server._watch, list[bool]()
    server._watch = SimpleNamespace(join=lambda: joined.append(server._context.closed))  # type: ignore[assignment]
    server.close()
    assert joined == [True], "which ends with its sockets"
    assert server._closing, "so that this is no loss"
    watch.join()
    client.close()


async def test_a_replica_that_ends_in_order_has_lost_no_connection() -> None:
    client, lost = TcpEngineClient("127.0.0.1"), Lost()
    server = TcpEngineServer(client.address, on_lost=lost)
    server.send(Credit(1))
    assert await client.receive() == Credit(1)
    server.close()
    assert not server._watch.is_alive()
    assert not lost.event.is_set()
    client.close()


async def test_a_client_that_closes_leaves_no_task_and_no_socket() -> None:
    before = asyncio.all_tasks()
    client = TcpEngineClient("127.0.0.1")
    monitors = client._monitors
    assert len(monitors) == 2
    client.close()
    async with asyncio.timeout(60):
        while asyncio.all_tasks() - before:
            await asyncio.sleep(0.001)
    assert all(monitor.closed for monitor in monitors)
    assert client._context.closed


def test_keys_of_both_ends_belong_together() -> None:
    ours, theirs = make_curve_keys()
    assert (ours.public, theirs.public) == (theirs.peer, ours.peer)
    assert zmq.curve_public(ours.secret.encode()).decode() == ours.public
    assert zmq.curve_public(theirs.secret.encode()).decode() == theirs.public
