"""Who may ask, and who may load models."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.api.state import NOBODY
from asr_server.errors import AdminRequired, InvalidApiKey
from tests.support.embedded import embedded
from tests.unit.api.named_keys import SHOP, WEB, entry, settings_with


def test_without_keys_nobody_is_asked_and_nobody_loads_models() -> None:
    open_to_all = ApiKeys(embedded())
    assert not open_to_all.required
    assert open_to_all.check("") is open_to_all.check("Bearer any") is NOBODY
    with pytest.raises(AdminRequired, match="'admin: true' in --keys-file"):
        open_to_all.check_admin("Bearer any")


def test_a_key_is_a_bearers_whatever_case_the_word_has(tmp_path: Path) -> None:
    keys = ApiKeys(settings_with(tmp_path / "keys", entry("web", WEB), api_key="the-key-of-everybody"))
    account = keys.check(f"bearer  {WEB} ").account
    assert (account and account.name, keys.accounts) == ("web", (account,))
    assert keys.check("BEARER the-key-of-everybody").account is None
    for authorization in ("", "Bearer", "Bearer ", f"Basic {WEB}", WEB):
        with pytest.raises(InvalidApiKey, match="No API key: send it"):
            keys.check(authorization)
    with pytest.raises(InvalidApiKey, match="Incorrect API key"):
        keys.check(f"Bearer {SHOP}")


def test_a_signature_is_its_keys_for_its_message_alone_at_every_server_with_that_key(tmp_path: Path) -> None:
    settings = settings_with(tmp_path / "keys", entry("web", WEB), entry("shop", SHOP))
    keys, elsewhere = ApiKeys(settings), ApiKeys(settings)
    web, shop = (keys.check(f"Bearer {key}") for key in (WEB, SHOP))
    signature = keys.sign(b"message", web)
    for each in (keys, elsewhere):
        signer = each.signer_of(b"message", signature)
        assert signer is not None
        assert signer.digest == web.digest
    assert keys.signer_of(b"message", keys.sign(b"message", shop)) is shop
    assert keys.signer_of(b"massage", signature) is None
    open_to_all = ApiKeys(embedded())
    assert open_to_all.signer_of(b"message", open_to_all.sign(b"message", NOBODY)) is NOBODY


def test_a_key_that_can_be_guessed_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ApiKeys(embedded(api_key="x" * 20))
    assert not caplog.messages
    ApiKeys(embedded(api_key="x" * 19))
    assert "at least 20 random characters" in caplog.text


def test_a_model_that_is_not_served_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entries = (entry("web", WEB, models=["base"]), entry("shop", SHOP, models=["base", "turbo"]))
    ApiKeys(settings_with(tmp_path / "keys", *entries), ("base", "whisper-1"))
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line == "key 'shop' names the model 'turbo', which is not served"
