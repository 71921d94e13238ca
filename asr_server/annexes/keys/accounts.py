"""`--keys-file`: each key's name, hash, models and limits, and what it has used. Errors repeat no key."""

import math
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec

from asr_server.api.schemas import LIMIT_UNITS
from asr_server.config import naming
from asr_server.errors import RateLimited

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
    entries = parse_yaml(path.read_bytes())
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


def parse_yaml(text: bytes) -> object:
    """Raises ValueError, which quotes nothing of the text."""
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


PLACE_WAIT_S: Final = 1.0  # for one of the key's own requests to end


class Bucket:
    """Refill `per_minute` units a minute; 0: no limit. An overdrawn bucket has none until it is paid back."""

    def __init__(self, unit: str, clock: Callable[[], float]) -> None:
        self.per_minute = 0
        self._unit = unit
        self._used = 0.0
        self._clock, self._measured_at = clock, clock()

    def set_limit(self, per_minute: int) -> None:
        self._used = self._in_use() if self.per_minute and per_minute else 0.0
        self.per_minute = per_minute

    def spend(self, amount: float) -> None:
        if self.per_minute:
            self._used = self._in_use() + amount

    def wait_s(self) -> float:
        """Return the seconds until a unit is left."""
        missing = round(self._in_use() + 1 - self.per_minute, 6)
        return max(0.0, missing) * self._unit_s if self.per_minute else 0.0

    def headers(self) -> dict[str, str]:
        if not self.per_minute:
            return {}
        used = self._in_use()
        return {
            f"x-ratelimit-limit-{self._unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{self._unit}": str(max(0, math.floor(self.per_minute - used))),
            f"x-ratelimit-reset-{self._unit}": format_duration(used * self._unit_s),
        }

    @property
    def _unit_s(self) -> float:
        return 60 / self.per_minute

    def _in_use(self) -> float:
        now = self._clock()
        self._used = max(0.0, self._used - (now - self._measured_at) * self.per_minute / 60)
        self._measured_at = now
        return self._used


def format_duration(duration_s: float) -> str:
    """Write a duration as OpenAI's headers do: `20ms`, `8.64s`, `6m0s`."""
    if duration_s < 1:
        return f"{math.ceil(1000 * duration_s)}ms"
    minutes, seconds = divmod(round(duration_s, 2), 60)
    return f"{minutes:.0f}m{seconds:.4g}s" if minutes else f"{seconds:.4g}s"


class Account:
    """One name's limits and use. It outlives the versions of the file that have the name."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_open = 0
        self.audio_s = 0.0
        self.answers = Counter[int]()  # by status
        self._requests, self._audio = (Bucket(unit, clock) for unit in LIMIT_UNITS)
        self.set_key(key)

    def set_key(self, key: Key) -> None:
        self.key = key
        self.name, self.models, self.is_admin = key.name, key.models, key.admin
        self._requests.set_limit(key.requests_per_minute)
        self._audio.set_limit(key.audio_seconds_per_minute)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request or a session while the block runs. Raises RateLimited."""
        self.require_room()
        self._requests.spend(1)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    def require_room(self) -> None:
        """Raises RateLimited."""
        if 0 < self.key.concurrent_requests <= self.num_open:
            raise self._refusal("requests at once", "concurrent_requests", PLACE_WAIT_S)
        if wait_s := self._requests.wait_s():
            raise self._refusal("requests a minute", "requests_per_minute", wait_s)
        self.require_audio()

    def require_audio(self) -> None:
        """Raises RateLimited."""
        if wait_s := self._audio.wait_s():
            raise self._refusal("seconds of audio a minute", "audio_seconds_per_minute", wait_s)

    def _refusal(self, of: str, field: str, wait_s: float) -> RateLimited:
        limit = f"{getattr(self.key, field)} {of}"
        return RateLimited(
            f"Rate limit reached for the key '{self.name}': {limit} ('{field}' in {naming('keys_file')}). "
            f"Please try again in {format_duration(wait_s)}.",
            wait_s,
        )

    def spend_audio(self, duration_s: float) -> None:
        self.audio_s += duration_s
        self._audio.spend(duration_s)

    def headers(self) -> dict[str, str]:
        return self._requests.headers() | self._audio.headers()
