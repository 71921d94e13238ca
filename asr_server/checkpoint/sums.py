"""Compares files with the sums that their publishers state."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_SHA256_DIGITS: Final = 64
_BLOCK_BYTES: Final = 1 << 20


def has_sum(path: Path, expected: str) -> bool:
    """Whether the file has this sum: sha256, or with 40 digits the one that git names a small file by."""
    is_sha256 = len(expected) == _SHA256_DIGITS
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == expected
