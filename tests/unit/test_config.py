"""Settings: defaults and bounds that operators rely on, and what follows from them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from asr_server.annexes.keys.api_keys import ApiKeys
from asr_server.config import EMBEDDED_MODEL, in_mebibytes
from asr_server.server.settings import ServerSettings

MIB = 1024 * 1024


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(**values)


@pytest.mark.parametrize("name", ["model", "host"])
def test_a_model_and_an_address_are_never_empty(name: str) -> None:
    assert getattr(settings(**{name: "x"}), name) == "x"
    with pytest.raises(ValidationError):
        settings(**{name: ""})


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ValidationError):
        settings(prot=8000)


# -- Names ---------------------------------------------------------------------------------------------------


def test_a_model_answers_to_its_own_name_or_the_given_one_and_to_its_aliases(tmp_path: Path) -> None:
    file = tmp_path / "tiny.pt"
    file.touch()
    (tmp_path / "my.model").mkdir()
    own = [settings(model=name).model_names[0] for name in ("turbo", str(file), str(tmp_path / "my.model"))]
    assert own == ["turbo", "tiny", "my.model"]
    assert settings(served_model_name="ours", model_alias=" a , ,*,b").model_names == ("ours", "a", "b")
    assert settings(model_alias="a, *").takes_any_name
    assert not settings(model_alias="a").takes_any_name
    assert "whisper-1" in settings().model_names


def test_lists_are_read_without_spaces_and_empty_entries_and_hosts_in_lower_case() -> None:
    origins = "https://a.example , http://b:81"
    assert settings(cors_origins=origins).allowed_origins == ("https://a.example", "http://b:81")
    assert settings(allowed_hosts="ASR.example , b").allowed_host_names == ("asr.example", "b")
    assert settings().allowed_origins == settings().allowed_host_names == ()


def test_only_the_embedded_model_has_a_limit_and_says_why_it_serves() -> None:
    assert settings().model_description == "a Whisper model"
    chosen = settings(model=str(EMBEDDED_MODEL))
    limit = "hears English digits only, about 1 in 20 of them wrongly"
    assert (chosen.model_limit, chosen.model_description) == (limit, f"a Whisper model that {limit}")
    instead = settings(model=str(EMBEDDED_MODEL), why_embedded="no network")
    assert instead.model_limit == f"{limit}; it serves because base could not be fetched"


# -- What follows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["api_key", "keys_file"])
def test_a_key_is_asked_for_once_any_is_given(name: str) -> None:
    assert ApiKeys(settings(**{name: "key"})).required


@pytest.mark.parametrize("origins", ["app://obsidian.md", "https://a.example, capacitor://localhost", "*"])
def test_pages_of_apps_may_be_allowed_by_cors(origins: str) -> None:
    assert settings(cors_origins=origins).allowed_origins
    with pytest.raises(ValidationError):
        settings(cors_origins="obsidian.md")


@pytest.mark.parametrize(
    ("values", "num_gpus", "num_replicas"),
    [
        ({}, 0, 1),
        ({}, 4, 4),
        ({"device": "cpu"}, 4, 1),
        ({"replicas": 3}, 4, 3),
        ({"tensor_parallel_size": 2}, 5, 2),
        ({"tensor_parallel_size": 8}, 4, 1),
    ],
)
def test_there_is_a_replica_for_each_device(
    values: dict[str, Any], num_gpus: int, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asr_server.config.num_gpus", lambda: num_gpus)
    assert settings(**values).num_replicas == num_replicas


@pytest.mark.parametrize(
    ("values", "cores", "num_threads"),
    [
        ({}, 12, 12),
        ({"replicas": 3}, 12, 4),
        ({"replicas": 2, "tensor_parallel_size": 3}, 12, 2),
        ({"replicas": 5}, 12, 2),
        ({"replicas": 13}, 12, 1),
        ({"replicas": 3, "cpu_threads": 7}, 12, 7),
    ],
)
def test_threads_share_the_cores_between_all_processes(
    values: dict[str, Any], cores: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asr_server.config.available_cores", lambda: cores)
    assert settings(device="cpu", **values).threads_per_rank == num_threads


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (1024 * MIB, "1024 MiB"),
        (1.26 * MIB, "1.3 MiB"),
        (MIB / 10, "0.1 MiB"),
        (MIB // 10, "104857 bytes"),
        (1.5, "1.5 bytes"),
    ],
)
def test_sizes_are_in_mebibytes_and_little_ones_in_bytes(num_bytes: float, words: str) -> None:
    assert in_mebibytes(num_bytes) == words
