"""What may stand in `--keys-file`, and what its errors say: never a hash, never a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from asr_server.annexes.keys.accounts import MAX_KEYS, Key, read_keys_file
from tests.contract.test_documentation import ROOT, blocks_of
from tests.unit.api.named_keys import NEW, SHOP, WEB, entry, hash_of, text_of, write
from tests.unit.cli.test_options import problems


def test_a_key_has_a_name_a_hash_and_limits_that_are_none_unless_given(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml")
    path.write_text(
        f"- name: web site\n  hash: {hash_of(WEB)}\n"
        f"- name: shop\n  hash:\n    - {hash_of(SHOP).upper()}\n    - {hash_of(NEW)}\n"
        "  models: [base, turbo]\n  requests_per_minute: 60\n  audio_seconds_per_minute: 600\n"
        "  concurrent_requests: 4\n  admin: true\n"
    )
    web, shop = read_keys_file(path)
    assert web == Key("web site", hash_of(WEB))
    assert (web.requests_per_minute, web.audio_seconds_per_minute, web.concurrent_requests) == (0, 0, 0)
    assert (web.models, web.admin) == (None, False)
    assert shop.digests == (bytes.fromhex(hash_of(SHOP)), bytes.fromhex(hash_of(NEW)))
    assert shop.models == ("base", "turbo")
    limits = (shop.requests_per_minute, shop.audio_seconds_per_minute, shop.concurrent_requests)
    assert (limits, shop.admin) == ((60, 600, 4), True)


WHOLE = text_of(entry("web", WEB), entry("shop", SHOP))
BROKEN = {
    "empty": ("", "must be a list of at most 1000 keys"),
    "cut within an entry": (WHOLE[:40], "is not YAML: line"),
    "no list": (f"web: {hash_of(WEB)}", "must be a list of at most 1000 keys"),
    "keys one a line": (f"- {WEB}\n", "key 1 must have fields of these names only: name, hash"),
    "no name": (f"- hash: {hash_of(WEB)}", "key 1 has no 'name'"),
    "no hash": (
        "- name: web",
        "key 1 ('web') has no 'hash': the SHA-256 of the key in 64 hexadecimal digits",
    ),
    "a key in place of its hash": (f"- {{name: web, hash: {WEB}}}", "key 1 ('web') has a wrong 'hash'"),
    "a key in place of a field": (
        f"- {{name: web, {WEB}: x}}",
        "key 1 ('web') must have fields of these names only",
    ),
    "a name of two lines": (
        '- {name: "a\\nb", hash: x}',
        "1 to 64 printable ASCII characters",
    ),
    "a name with a line end": (
        '- {name: "a\\n", hash: x}',
        "1 to 64 printable ASCII characters",
    ),
    "a limit below none": (
        text_of(entry("web", WEB, requests_per_minute=-1)),
        "'requests_per_minute': it must be a whole number from 0",
    ),
    "a limit in words": (
        text_of(entry("web", WEB, concurrent_requests="four")),
        "'concurrent_requests'",
    ),
    "one name twice": (text_of(entry("web", WEB), entry("web", SHOP)), "'web' is the name of 2 keys"),
    "one hash twice": (text_of(entry("web", WEB), entry("shop", WEB)), "two keys have the same hash"),
    "too many": (
        text_of(*(entry(str(number), str(number)) for number in range(MAX_KEYS + 1))),
        "must be a list of at most 1000 keys",
    ),
    "a tag that does not fit": ('- name: !!int ""', "is not YAML"),
    "too deep": ("[" * 2000, "is not YAML"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_by_a_reason_without_hash_and_key(case: str, tmp_path: Path) -> None:
    content, reason = BROKEN[case]
    path = write(tmp_path / "keys.yaml")
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        read_keys_file(path)
    assert reason in str(caught.value)
    for key in (WEB, SHOP):
        assert key not in str(caught.value)
        assert hash_of(key)[:12] not in str(caught.value)


def test_a_file_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry("web", WEB))
    path.chmod(0o646)
    with pytest.raises(ValueError, match="every user of this machine can write"):
        read_keys_file(path)


def test_a_wrong_file_and_one_without_keys_end_the_start_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    (missing,) = problems(keys_file=str(path))
    path.write_text("[]")
    (empty,) = problems(keys_file=str(path))
    path.write_text(f"- name: web\n  hash: {hash_of(WEB)}\n  burst: 3\n")
    (wrong,) = problems(keys_file=str(path))
    assert all("--keys-file (ASR_SERVER_KEYS_FILE) is" in line for line in (missing, empty, wrong))
    assert "No such file" in missing
    assert "must have at least one key" in empty
    assert "key 1 ('web') must have fields of these names only" in wrong
    assert hash_of(WEB) not in wrong


def test_the_example_of_the_docs_is_a_file_of_keys(tmp_path: Path) -> None:
    (example,) = blocks_of(ROOT / "docs" / "keys.md", "yaml")
    path = write(tmp_path / "keys.yaml")
    path.write_text(example)
    assert [(key.name, key.admin) for key in read_keys_file(path)] == [
        ("web-site", False),
        ("operators", True),
    ]
