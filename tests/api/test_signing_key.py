"""Client secrets are signed by a random key, which servers with one key file share."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from asr_server.api.auth import ApiKeys
from asr_server.api.keys_file import Caller
from asr_server.api.signing_key import NUM_BYTES, signing_key
from tests.embedded import embedded

GRANT = b"until noon"
KEY = "a-key-of-more-than-20-letters"


def caller(api_keys: ApiKeys, key: str = KEY) -> Caller:
    return api_keys.check(f"Bearer {key}")


def signature_of(api_keys: ApiKeys, key: str = KEY) -> bytes:
    return api_keys.sign(GRANT, caller(api_keys, key))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def test_who_knows_the_api_key_cannot_tell_it_by_a_signature() -> None:
    signature = signature_of(ApiKeys(embedded(api_key="s3cret")), "s3cret")
    derived = hashlib.sha256(b"realtime client secret\0s3cret").digest()
    assert signature != hmac.digest(derived, GRANT, "sha256")
    assert signature != signature_of(ApiKeys(embedded(api_key="s3cret")), "s3cret")


def test_servers_with_the_same_key_file_accept_each_others_secrets_after_a_restart_too(keys: Path) -> None:
    servers = [ApiKeys(embedded(api_key_file=str(keys))) for _ in range(2)]
    signature = signature_of(servers[0])
    assert servers[1].signer_of(GRANT, signature) == caller(servers[1])
    assert servers[1].signer_of(GRANT + b"!", signature) is None
    (path,) = set(keys.parent.iterdir()) - {keys}
    assert path.name == "keys.signing"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_secret_ends_with_the_api_key_that_it_was_asked_for_with(keys: Path) -> None:
    keys.write_text(f"first-key-of-more-than-20-letters\n{KEY}\n")
    signature = signature_of(ApiKeys(embedded(api_key_file=str(keys))))
    for lines, is_known in ((f"{KEY}\n", True), ("first-key-of-more-than-20-letters\n", False)):
        keys.write_text(lines)
        server = ApiKeys(embedded(api_key_file=str(keys)))
        assert (server.signer_of(GRANT, signature) is not None) == is_known


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"short", 0o600, "at least 32 random bytes"),
        (bytes(32), 0o604, "every user"),
        (bytes(32), 0o602, "every user"),
    ],
)
def test_a_signing_key_that_others_may_know_is_not_used(
    content: bytes, mode: int, reason: str, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys.with_name("keys.signing")
    path.write_bytes(content)
    path.chmod(mode)
    assert len({signing_key(keys), signing_key(keys)} - {content}) == 2
    assert reason in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_signing_key_that_another_user_has_put_there_is_not_used(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys.with_name("keys.signing")
    path.write_bytes(bytes(NUM_BYTES))
    os.chown(path, 65534, 65534)
    path.chmod(0o600)
    assert signing_key(keys) != bytes(NUM_BYTES)
    assert "it belongs to another user" in caplog.text


def test_where_no_file_can_be_made_secrets_hold_for_the_process_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert signing_key(Path("/proc/keys")) != signing_key(Path("/proc/keys"))
    assert "client secrets hold for this process alone" in caplog.text


@pytest.mark.parametrize("form", ["api_key", "api_key_file"])
def test_a_key_that_can_be_guessed_brings_a_warning(
    form: str, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key, num_warnings in (("x" * 20, 0), ("x" * 19, 1)):
        keys.write_text(key)
        caplog.clear()
        assert ApiKeys(embedded(**{form: str(keys) if form == "api_key_file" else key})).current == (key,)
        assert caplog.text.count("should have at least 20 random characters") == num_warnings
        assert key not in caplog.text


def test_a_key_has_32_bytes_and_up_to_4096_of_a_file_count(keys: Path) -> None:
    assert len(signing_key(None)) == len(signing_key(keys)) == 32
    path = keys.with_name("keys.signing")
    for content in (os.urandom(32), os.urandom(5000)):
        path.write_bytes(content)
        path.chmod(0o600)
        assert signing_key(keys) == content[:4096]


@pytest.mark.skipif(os.geteuid() != 0, reason="writes a file of root's")
def test_a_signing_key_of_root_is_used_by_any_user(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = signing_key(keys)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert signing_key(keys) == made
