"""CURVE: the keys of the two ends of a connection between hosts, and who is let in.

Whoever connects must hold the one secret key that was made for the replica, and the listening end shows by
its own key that it is the server. Everything between them is encrypted. (https://rfc.zeromq.org/spec/26/)
"""

from __future__ import annotations

from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

_DOMAIN: Final = "replicas"  # libzmq asks the authenticator about connections in a domain


class CurveKeys(msgspec.Struct, frozen=True):
    """What one end holds: its own pair and the public key of the other end, as Z85 text."""

    public: str
    secret: str
    peer: str

    def __repr__(self) -> str:
        return "CurveKeys()"  # a secret is for no log


def make_curve_keys() -> tuple[CurveKeys, CurveKeys]:
    """Fresh keys for the API's end and for the replica's."""
    (public, secret), (other_public, other_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    ours = CurveKeys(public.decode(), secret.decode(), other_public.decode())
    return ours, CurveKeys(other_public.decode(), other_secret.decode(), public.decode())


def listen_with(keys: CurveKeys, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    """Before `bind`: takes only connections that an authenticator of the context lets in."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret.encode()
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def connect_with(keys: CurveKeys, socket: zmq.Socket[bytes]) -> None:
    """Before `connect`."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = keys.peer.encode()


def start_authenticator(keys: CurveKeys, context: zmq.Context[zmq.Socket[bytes]]) -> AsyncioAuthenticator:
    """Lets in whoever proves to hold the secret key that belongs to `keys.peer`. Its owner stops it."""
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, _OnlyPeer(keys.peer))
    return authenticator


class _OnlyPeer:
    """What pyzmq calls a provider of credentials."""

    def __init__(self, peer: str) -> None:
        self._peer = peer.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._peer
