"""Files of keys with names, as an operator writes them, and clients that have these keys."""

import hashlib
import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.server.settings import ServerSettings
from tests.support.embedded import embedded
from tests.support.until import until
from tests.unit.api.running_app import RunningApp

WEB, SHOP, NEW = (f"{name}-key-of-more-than-20-letters" for name in ("web", "shop", "new"))


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, *keys: str, **fields: Any) -> dict[str, Any]:
    hashes = [hash_of(key) for key in keys]
    return {"name": name, "hash": hashes[0] if len(hashes) == 1 else hashes} | fields


def text_of(*entries: dict[str, Any]) -> str:
    return "".join(f"- {json.dumps(each)}\n" for each in entries) or "[]\n"  # JSON is YAML


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(text_of(*entries))
    path.chmod(0o600)
    return path


def settings_with(path: Path, *entries: dict[str, Any], **values: Any) -> ServerSettings:
    return embedded(keys_file=str(write(path, *entries)), **values)


def named(app: RunningApp) -> ApiKeys:
    keys = app.app.state.server.api_keys
    assert isinstance(keys, ApiKeys)
    return keys


async def rewrite(app: RunningApp, path: Path, *entries: dict[str, Any]) -> None:
    """Return once the running server has taken the new file."""
    before = named(app).callers
    write(path, *entries)
    await until(lambda: named(app).callers is not before)


def official(app: RunningApp, key: str, max_retries: int = 0) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{app.url}/v1", api_key=key, max_retries=max_retries)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(app: RunningApp, key: str) -> int:
    return (await app.client.get("/v1/models", headers=bearer(key))).status_code
