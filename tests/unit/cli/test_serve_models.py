"""`--models`: several models by one flag or a file, and what is wrong with either, in a line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from asr_server.cli import main
from asr_server.cli.serve import read_models
from asr_server.config import EMBEDDED_MODEL
from asr_server.server.settings import ServerSettings


def refusal(*arguments: str) -> list[str]:
    result = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2
    return result.output.splitlines()


def test_a_flag_names_models_by_name_and_path() -> None:
    base, turbo = read_models("base,turbo=/models/large-v3-turbo")
    assert (base["served_model_name"], base["model"]) == ("", "base")
    assert "model_alias" not in base  # it has those of --model-alias
    assert turbo == {"served_model_name": "turbo", "model": "/models/large-v3-turbo", "model_alias": ""}


def test_a_file_gives_each_model_settings_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        "- name: base\n  aliases: [whisper-1, small]\n  load: pinned\n"
        "- name: turbo\n  model: /models/turbo\n  dtype: int8\n  replicas: 2\n  idle_unload_s: 600\n"
    )
    base, turbo = read_models(str(path))
    assert base == {
        "served_model_name": "base",
        "model": "base",
        "model_alias": "whisper-1,small",
        "load": "pinned",
    }
    assert (turbo["model"], turbo["dtype"], turbo["replicas"], turbo["idle_unload_s"]) == (
        *("/models/turbo", "int8"),
        *(2, 600),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("base: turbo", "must be a list of models"),
        ("- [", "not YAML"),
        ("- model: base", "model 1 of the file has no name"),
        ("- name: base\n  dtyp: int8", "base has the unknown key 'dtyp'; known: name, aliases, model"),
        ("- name: base\n  aliases: whisper-1", "aliases of base must be a list"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    (line,) = refusal("--models", str(path))
    assert line.startswith("Error: --models (ASR_SERVER_MODELS) is ")
    assert reason in line


def test_a_wrong_setting_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(
        f"- name: digits\n  model: {EMBEDDED_MODEL}\n  dtype: int3\n- name: nowhere\n  model: /none\n"
    )
    wrong_value, no_model = refusal("--models", str(path))
    assert wrong_value.startswith("Error: model digits: --dtype (ASR_SERVER_DTYPE) is 'int3'")
    assert no_model.startswith("Error: model nowhere: --model (ASR_SERVER_MODEL) is '/none'")


def test_two_models_cannot_share_a_name() -> None:
    (line,) = refusal("--models", f"one={EMBEDDED_MODEL},one={EMBEDDED_MODEL}")
    assert line.endswith("one is the name of 2 models")


def test_models_cannot_be_combined_with_a_model() -> None:
    (line,) = refusal("whisper-digits", "--models", f"one={EMBEDDED_MODEL}")
    assert "leave out MODEL" in line


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of the models that a server would be run with."""
    found: list[ServerSettings] = []

    def run(models: list[ServerSettings]) -> int:
        found.extend(models)
        return 0

    monkeypatch.setattr("asr_server.server.run.run", run)
    return found


def test_a_server_has_one_model_or_all_of_the_list_with_its_other_settings(
    served: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASR_SERVER_MODEL")
    one = ["serve", str(EMBEDDED_MODEL), "--port", "0", "--drain-s", "7"]
    assert CliRunner().invoke(main, one).exit_code == 0
    assert [(each.model_names[0], each.drain_s) for each in served] == [("whisper-digits", 7)]
    served.clear()
    listed = f"a={EMBEDDED_MODEL}, b={EMBEDDED_MODEL}"
    done = CliRunner().invoke(main, ["serve", "--models", listed, "--port", "0", "--drain-s", "7"])
    assert done.exit_code == 0, done.output
    assert [(each.model_names[0], each.drain_s, each.model) for each in served] == [
        ("a", 7, str(EMBEDDED_MODEL)),
        ("b", 7, str(EMBEDDED_MODEL)),
    ]
    assert "whisper-1" in served[0].model_names
    assert served[1].model_names == ("b",)


@pytest.mark.parametrize("text", ["a=", "", "base,,turbo"])
def test_an_entry_without_a_model_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be name=MODEL,name=MODEL, and '.*' names no model"):
        list(read_models(text))
