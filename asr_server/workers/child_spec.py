"""What a process that computes is told at its start: a line of JSON, by pipe or as an argument of a call."""

from __future__ import annotations

from typing import Self

import msgspec


class ChildSpec(msgspec.Struct, frozen=True):
    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        return msgspec.json.decode(line, type=cls)
