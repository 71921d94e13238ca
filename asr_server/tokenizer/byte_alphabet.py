"""The alphabet of byte-level BPE (GPT-2): every byte is written as one printable character.

Bytes that print in Latin-1 stand for themselves; the others take the code points from 256 on, in order.
"""

from __future__ import annotations


def _character_of_byte() -> dict[int, str]:
    """In GPT-2's order: that of its vocabulary's first 256 tokens."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


CHARACTER_OF_BYTE = _character_of_byte()
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
