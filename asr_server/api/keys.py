"""Read `--keys-file`: each key's name, hash, models and limits. Knows no request.

No error repeats a hash or a key.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import msgspec

MAX_KEYS: Final = 1000  # each given key is compared with all
_NAME: Final = r"^[!-~]([ -~]{0,62}[!-~])?\Z"
_UNKNOWN: Final = re.compile(r"contains unknown field `.*`(?= - at|$)", re.DOTALL)

_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
_Limit = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file. A limit of 0 is none."""

    name: _Name
    hash: _Hash | Annotated[tuple[_Hash, ...], msgspec.Meta(min_length=1, max_length=8)]  # sha256 of the key
    models: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None  # None: all
    requests_per_minute: _Limit = 0
    audio_seconds_per_minute: _Limit = 0
    concurrent_requests: _Limit = 0
    admin: bool = False

    @property
    def digests(self) -> tuple[bytes, ...]:
        hashes = (self.hash,) if isinstance(self.hash, str) else self.hash
        return tuple(map(bytes.fromhex, hashes))


def read_named_keys(path: Path) -> tuple[Key, ...]:
    """Raises OSError, ValueError."""
    require_trusted(path)
    keys = _keys_of(_parsed(path.read_bytes()))
    name, count = next(iter(Counter(key.name for key in keys).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{name!r} is the name of {count} keys: give one key a list of hashes")
    digests = [digest for key in keys for digest in key.digests]
    if len(set(digests)) < len(digests):
        raise ValueError("two keys have the same hash")
    return keys


def require_trusted(path: Path) -> None:
    """Raises OSError; ValueError if every user could add a key."""
    if path.stat().st_mode & stat.S_IWOTH:
        raise ValueError("every user of this machine can write the file: chmod o-w")


def _parsed(text: bytes) -> object:
    import yaml  # takes a while, and few need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)  # nosec B506 # both loaders are safe
    except Exception as error:  # a YAMLError quotes the file; `!!int x` raises other errors
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"the file is not YAML{f': line {mark.line + 1}' if mark else ''}") from None


def _keys_of(parsed: object) -> tuple[Key, ...]:
    kind = Annotated[tuple[Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
    try:
        keys: tuple[Key, ...] = msgspec.convert(parsed, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(Key.__struct_fields__)
        reason = _UNKNOWN.sub(f"has a field that is none of {known}", str(error))
        raise ValueError(f"the file must be a list of keys: {reason}") from None
    return keys
