"""Both ends of a connection between hosts: ZeroMQ over TCP with CURVE encryption.

A broken connection is never restored, because messages may be lost: the replica ends and is replaced. TCP
keep-alive detects a lost host, so a paused process loses nothing.

CURVE (https://rfc.zeromq.org/spec/26/): the client proves that it holds the replica's secret key, the
server shows its own.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Final

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from asr_server.machine import in_url
from asr_server.transport.messages import LogLine
from asr_server.transport.zeromq import Address, CurveKeys, ZmqEngineClient, ZmqEngineServer

MAX_COMMAND_BYTES: Final = 64 << 20  # many times a chunk; a longer message ends the connection
MAX_EVENT_BYTES: Final = 16 << 20
HANDSHAKE_LIMIT_MS: Final = 5000
DIAL_LIMIT_MS: Final = 10_000  # for the connection to be made
MAX_LOG_LINE_CHARS: Final = 20_000
UNANSWERED_LIMIT_MS: Final = 10_000  # for the other host's kernel
_KEEPALIVE: Final[Mapping[int, int]] = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 4,  # s
    zmq.TCP_KEEPALIVE_INTVL: 2,  # s
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: UNANSWERED_LIMIT_MS,
}
_REFUSED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DOMAIN: Final = "replicas"  # libzmq asks the authenticator about connections in a domain
_LOST: Final = _REFUSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

logger = logging.getLogger(__name__)


def make_curve_keys() -> tuple[CurveKeys, CurveKeys]:
    (public, secret), (other_public, other_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    ours = CurveKeys(public.decode(), secret.decode(), other_public.decode())
    return ours, CurveKeys(other_public.decode(), other_secret.decode(), public.decode())


class TcpEngineClient(ZmqEngineClient):
    def __init__(self, host: str) -> None:
        self._host = in_url(host)
        self._authenticator: AsyncioAuthenticator | None = None
        self._monitors: list[zmq.asyncio.Socket] = []
        self._watches: list[asyncio.Task[None]] = []
        self._has_logged_refusal = False
        super().__init__()

    def _listen(self) -> None:
        ours, theirs = make_curve_keys()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        only_peer = SimpleNamespace(callback=lambda domain, key: key == ours.peer.encode())
        self._authenticator.configure_curve_callback(_DOMAIN, only_peer)
        for socket in (self._coming, self._commands):
            _keep_alive(socket)
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_EVENT_BYTES)
            socket.setsockopt(zmq.IPV6, int("[" in self._host))
            socket.curve_server = True
            socket.curve_secretkey = ours.secret.encode()
            socket.zap_domain = _DOMAIN.encode()
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._watch(socket)
            socket.bind(f"tcp://{self._host}:*")
        self.address = Address(_endpoint(self._coming), _endpoint(self._commands), keys=theirs)

    def _watch(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        address = f"inproc://monitor-{socket.fileno()}"
        socket.monitor(address, _REFUSED)
        monitor = zmq.asyncio.Socket(self._context, zmq.PAIR)
        monitor.connect(address)
        self._monitors.append(monitor)
        self._watches.append(asyncio.create_task(self._log_first_refusal(monitor)))

    async def _log_first_refusal(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())
            if not self._has_logged_refusal and event["event"] & _REFUSED:
                self._has_logged_refusal = True
                endpoint = event["endpoint"].decode()
                logger.warning("rejected a connection to %s: wrong or missing key", endpoint)

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for socket in self._monitors:
            socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        super().close()


class TcpEngineServer(ZmqEngineServer):
    """Connect once. Call `on_lost`, from another thread, when the connection fails or breaks."""

    def __init__(self, address: Address, on_lost: Callable[[], None]) -> None:
        self._monitors: list[zmq.Socket[bytes]] = []
        self._closing = False
        self.log_handler = LogHandler(self)
        super().__init__(address)
        self._watch = threading.Thread(
            target=self._call_when_lost, args=(on_lost,), name="connection-watch", daemon=True
        )
        self._watch.start()

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        keys = self._address.keys
        assert keys is not None
        _keep_alive(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, DIAL_LIMIT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in self._address.events))
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.curve_serverkey = keys.peer.encode()
        self._monitors.append(socket.get_monitor_socket(_LOST))

    def _call_when_lost(self, on_lost: Callable[[], None]) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        with contextlib.suppress(zmq.ContextTerminated):
            while True:
                for monitor, _ in poller.poll():
                    event = parse_monitor_message(monitor.recv_multipart())["event"]
                    if event & _LOST and not self._closing:
                        on_lost()
        for monitor in self._monitors:
            monitor.close(linger=0)

    def close(self) -> None:
        self._closing = True
        logging.root.removeHandler(self.log_handler)
        super().close()
        self._watch.join()


class LogHandler(logging.Handler):
    def __init__(self, server: TcpEngineServer) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.send(LogLine(self.format(record)[:MAX_LOG_LINE_CHARS]))


def _endpoint(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> str:
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _keep_alive(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    for option, value in _KEEPALIVE.items():
        with contextlib.suppress(zmq.ZMQError):  # a system that lacks this one
            socket.setsockopt(option, value)
