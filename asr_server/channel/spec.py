"""What a process that computes is told at its start: a line of JSON, by pipe or as an argument of a call."""

from __future__ import annotations

from typing import Self

import msgspec

from asr_server.channel.zeromq import Address
from asr_server.config import Settings


class ChildSpec(msgspec.Struct, frozen=True):
    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        return msgspec.json.decode(line, type=cls)


class ReplicaSpec(ChildSpec, frozen=True):
    index: int
    address: Address
    settings: Settings
    num_on_device: int = 1  # replicas that share this one's device
    cores: tuple[int, ...] = ()  # that this one is kept to; none: all
    niceness: int = 0  # by which it lets others go before it
