"""Read `--keys-file`: each key's name, hash, models and limits. No error repeats a hash or a key."""

from __future__ import annotations

import re
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated, Final

import msgspec

MAX_KEYS: Final = 1000  # each given key is compared with all
MAX_LIMIT: Final = 10**9
_NAME: Final = r"^[!-~]([ -~]{0,62}[!-~])?\Z"

_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
_Limit = Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)]


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


_LIMIT_RULE: Final = f"a whole number from 0 to {MAX_LIMIT}"
_RULES: Final = {
    "name": "1 to 64 printable ASCII characters",
    "hash": "the SHA-256 of the key in 64 hexadecimal digits, or a list of 1 to 8 of these",
    "models": "a list of names of models",
    "requests_per_minute": _LIMIT_RULE,
    "audio_seconds_per_minute": _LIMIT_RULE,
    "concurrent_requests": _LIMIT_RULE,
    "admin": "true or false",
}


def read_keys_file(path: Path) -> tuple[Key, ...]:
    """Raises OSError; ValueError if the file is broken, or every user could add a key."""
    if path.stat().st_mode & stat.S_IWOTH:
        raise ValueError("every user of this machine can write the file: chmod o-w")
    entries = _parsed(path.read_bytes())
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ValueError(f"the file must be a list of at most {MAX_KEYS} keys")
    keys = tuple(_key_of(number, entry) for number, entry in enumerate(entries, 1))
    name, count = next(iter(Counter(key.name for key in keys).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"{name!r} is the name of {count} keys: give one key a list of hashes")
    digests = [digest for key in keys for digest in key.digests]
    if len(set(digests)) < len(digests):
        raise ValueError("two keys have the same hash")
    return keys


def _parsed(text: bytes) -> object:
    import yaml  # takes a while, and few need it

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)  # nosec B506 # both loaders are safe
    except Exception as error:  # a YAMLError quotes the file; `!!int x` raises other errors
        mark = getattr(error, "problem_mark", None)
        raise ValueError(f"the file is not YAML{f': line {mark.line + 1}' if mark else ''}") from None


def _key_of(number: int, entry: object) -> Key:
    try:
        return msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        name = entry.get("name") if isinstance(entry, dict) else None
        is_name = isinstance(name, str) and re.match(_NAME, name)
        shown = f"key {number} ('{name}')" if is_name else f"key {number}"
        raise ValueError(f"{shown} {_reason(str(error))}") from None


def _reason(text: str) -> str:
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return f"has no '{missing[1]}': {_RULES[missing[1]]}"
    if field := re.search(r" - at `\$\.(\w+)", text):
        return f"has a wrong '{field[1]}': it must be {_RULES[field[1]]}"
    return f"must have fields of these names only: {', '.join(_RULES)}"
