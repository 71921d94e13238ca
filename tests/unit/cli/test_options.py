"""Settings are checked once, together, at the start: each wrong one is a line that says how to mend it."""

import json
import math
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from asr_server.cli import main
from asr_server.cli.checks import FOR_A_SERVER
from asr_server.cli.options import (
    SettingsError,
    checked_settings,
    configure_log,
    in_our_spelling,
    unknown_variables,
)
from asr_server.cli.serve import serve
from asr_server.cli.transcribe import transcribe as command
from asr_server.config import EMBEDDED_MODEL, flag_name, variable_name
from asr_server.core import Clip
from asr_server.errors import CheckpointError
from asr_server.server.settings import FIELDS, SECTIONS, ServerSettings, extra
from tests.support.embedded import embedded
from tests.system.cli.test_transcribe import heard, record, said, transcribe_here


def problems(**values: object) -> list[str]:
    with pytest.raises(SettingsError) as error:
        checked_settings({"port": 0} | values, FOR_A_SERVER)
    assert not any("\n" in problem for problem in error.value.problems)
    return error.value.problems


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("port", "70000", "must be less than or equal to 65535"),
        ("port", "http", "must be a valid integer, unable to parse string as an integer"),
        ("max_audio_s", "nan", "must be a finite number"),
        ("device", "tpu", "must be 'auto', 'cpu' or 'cuda'"),
        ("reuse_port", "maybe", "must be a valid boolean, unable to interpret input"),
        ("root_path", "asr", "must be empty, or begins with /"),
        ("cors_origins", "a.example", f"must be {extra('cors_origins')['allowed']}"),
    ],
)
def test_a_wrong_value_is_one_line_with_flag_environment_name_value_and_what_is_allowed(
    setting: str, value: str, reason: str
) -> None:
    named = f"{flag_name(setting)} ({variable_name(setting)})"
    assert problems(**{setting: value}) == [f"{named} is {value!r}: {reason}"]


def test_a_wrong_port_says_nothing_of_the_default_that_somebody_else_uses() -> None:
    with socket.socket() as somebody:
        with suppress(OSError):  # it is in use already
            somebody.bind(("127.0.0.1", FIELDS["port"].default))
            somebody.listen()
        assert len(problems(port="70000", host="127.0.0.1")) == 1


def test_every_default_is_allowed_and_every_setting_says_what_is() -> None:
    given = {name: str(field.default) for name, field in FIELDS.items()}
    assert given["model"] == "base"
    given["model"] = "whisper-digits"
    assert checked_settings(given) == embedded(served_model_name="whisper-digits")
    assert all(field.description for field in FIELDS.values())


# -- What this machine has, beside what is asked for ---------------------------------------------------------


def test_the_model_becomes_its_directory_and_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EMBEDDED_MODEL.parent)
    settings = checked_settings({"model": "./whisper-digits"})
    assert (Path(settings.model).resolve(), settings.model_names[0]) == (EMBEDDED_MODEL, "whisper-digits")


def test_a_model_that_is_not_there_is_one_line_beside_the_others(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert problems(model=missing, replicas="-1") == [
        "--replicas (ASR_SERVER_REPLICAS) is '-1': must be greater than or equal to 0",
        f"--model (ASR_SERVER_MODEL) is {missing!r}: there is no directory {missing}",
    ]


def test_the_hub_is_not_asked_while_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "asr_server.cli.options.resolve_checkpoint", lambda name: pytest.fail("asked the hub")
    )
    assert len(problems(model="openai/whisper-tiny", replicas="-1")) == 1


def test_only_a_model_nobody_asked_for_gives_way_to_the_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> Path:
        raise CheckpointError(f"{name} is nowhere")

    monkeypatch.setattr("asr_server.cli.options.checkpoint_on_disk", lambda name: None)
    monkeypatch.setattr("asr_server.cli.options.resolve_checkpoint", nowhere)
    settings = checked_settings({})
    assert (settings.serves_embedded_model, settings.model_names[0]) == (True, "whisper-digits")
    assert settings.why_embedded == "base is nowhere"
    assert settings.model_limit.endswith("; it serves because base could not be fetched")
    with pytest.raises(SettingsError, match=r"--model .* is 'base': base is nowhere"):
        checked_settings({"model": "base"})


def test_logging_is_set_up_between_the_settings_and_the_models_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr("asr_server.cli.options.resolve_checkpoint", lambda name: happened.append(name))
    checked_settings({"model": "turbo"}, before_fetch=lambda settings: happened.append(settings.model))
    assert happened == ["turbo", "turbo"]
    with pytest.raises(SettingsError):
        checked_settings({"port": "none"}, before_fetch=lambda _: pytest.fail("too early"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_damaged_file_of_the_model_is_named_before_torch_is_loaded(tmp_path: Path, name: str) -> None:
    shutil.copytree(EMBEDDED_MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    (line,) = problems(model=str(tmp_path))
    assert line.startswith("--model (ASR_SERVER_MODEL) is ")
    assert str(tmp_path / name) in line


def test_a_key_loses_the_line_end_of_its_secret_and_is_refused_where_no_client_could_send_it() -> None:
    given = {"model": "whisper-digits"}
    assert checked_settings(given | {"api_key": "s3cret\n"}).api_key == "s3cret"
    assert checked_settings(given | {"api_key": ""}).api_key == ""
    for key in (" ", "\n", "a b", "a\x00b", "schlüssel"):
        (line,) = problems(api_key=key)
        assert (
            line
            == "--api-key (ASR_SERVER_API_KEY) is wrong: must be empty, or printable ASCII without spaces"
        )


def parsed(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return the settings of `serve` as its command line and environment give them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return serve.make_context("serve", arguments).params


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"ASR_SERVER_API_KEY": "own"}, "own"),
        ({"VLLM_API_KEY": "shared", "ASR_SERVER_API_KEY": "own"}, "shared"),
        ({"VLLM_API_KEY": "", "ASR_SERVER_API_KEY": "own"}, "own"),
        ({"VLLM_API_KEY": ""}, ""),
    ],
)
def test_a_setting_with_vllms_variable_has_its_own_too(given: dict[str, str], key: str) -> None:
    assert parsed([], given)["api_key"] == key
    assert list(unknown_variables(given)) == []
    assert parsed(["--api-key", "flag"], given)["api_key"] == "flag"


def test_only_the_ports_variable_may_be_the_link_of_a_service() -> None:
    link = "tcp://10.0.0.1:80"
    settings = parsed([], {"ASR_SERVER_PORT": link, "VLLM_API_KEY": link, "ASR_SERVER_HOST": link})
    assert (settings["port"], settings["api_key"], settings["host"]) == ("8000", link, link)


def test_a_variable_of_no_setting_is_named_with_the_nearest() -> None:
    links = {"ASR_SERVER_SERVICE_HOST": "10.0.0.1", "ASR_SERVER_PORT_8000_TCP_ADDR": "10.0.0.1"}
    right = {"ASR_SERVER_REPLICAS": "1", "PATH": "/bin"}
    (line,) = unknown_variables(links | right | {"ASR_SERVER_MAX_UPLOAD_BYTE": "1"})
    assert line == (
        "ASR_SERVER_MAX_UPLOAD_BYTE is ignored: no setting has this name; "
        "did you mean ASR_SERVER_MAX_UPLOAD_BYTES?"
    )


# -- Help ----------------------------------------------------------------------------------------------------


def flags_listed(command: str, help_flag: str) -> set[str]:
    text = CliRunner().invoke(main, [command, help_flag]).output
    return set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.MULTILINE))


def flags_of_options(command: str) -> set[str]:
    """The first long flag of each option."""
    options = [each for each in main.commands[command].params if isinstance(each, click.Option)]
    return {next(flag for flag in option.opts if flag.startswith("--")) for option in options} | {"--help"}


@pytest.mark.parametrize("command", ["serve", "transcribe"])
def test_help_has_every_flag_and_is_shown_whatever_else_is_wrong(command: str) -> None:
    assert flags_listed(command, "--help") == flags_of_options(command)
    shown = CliRunner().invoke(main, [command, "--port", "none", "--format", "pdf", "--help"])
    assert shown.output.startswith("Usage: ")


def test_each_setting_is_in_one_section_of_the_help_and_the_page() -> None:
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(FIELDS)


def test_help_says_of_each_setting_what_it_takes_its_variables_and_its_default() -> None:
    text = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    for shown in (
        "--device [auto|cpu|cuda] ",
        "--port INTEGER port to listen on; 0: any free one [env var: ASR_SERVER_PORT; default: 8000]",
        "--drain-s NUMBER ",
        "--host TEXT ",
        "--reuse-port / --no-reuse-port ",
        "[env var: VLLM_API_KEY, ASR_SERVER_API_KEY",
        "[env var: ASR_SERVER_REUSE_PORT; default: no-reuse-port]",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("arguments", "model", "may_be_replaced"),
    [([], "", True), (["--model", "base"], "base", False), (["turbo"], "turbo", False)],
)
def test_a_model_is_the_argument_or_the_flag_or_nobodys_wish(
    arguments: list[str], model: str, may_be_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def checked(values: dict[str, Any], *_: object) -> ServerSettings:
        given.update(values)
        raise SettingsError(["one", "two\x07"])

    monkeypatch.delenv("ASR_SERVER_MODEL")
    monkeypatch.setattr("asr_server.cli.options.checked_settings", checked)
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert (done.exit_code, done.stderr) == (2, "Error: one\nError: two\\x07\n")
    assert ("model" not in given) == may_be_replaced
    assert given.get("model", "") == model


def test_the_variables_that_nobody_reads_are_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASR_SERVER_PROT", "1")
    monkeypatch.setenv("ASR_SERVER_QQQQQQQQQQQQQQQQQQ", "1")
    configure_log(ServerSettings(log_level="warning"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith(
        "ASR_SERVER_PROT is ignored: no setting has this name; did you mean ASR_SERVER_PORT?"
    )
    assert lines[1].endswith("ASR_SERVER_QQQQQQQQQQQQQQQQQQ is ignored: no setting has this name")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--output_dir", "out"], ["--output-dir", "out"]),
        (["--output_format", "srt", "--threads", "2"], ["--format", "srt", "--cpu-threads", "2"]),
        (["--output_format=srt"], ["--format=srt"]),
        (["--initial_prompt", "a_b", "x_y.wav"], ["--prompt", "a_b", "x_y.wav"]),
        (["--word_timestamps", "True", "a.wav"], ["--word-timestamps", "a.wav"]),
        (["--word_timestamps", "False", "a.wav"], ["a.wav"]),
        (["--word_timestamps=True"], ["--word-timestamps"]),
        (["--word-timestamps", "a.wav"], ["--word-timestamps", "a.wav"]),
        (["--verbose", "False", "--fp16", "False"], ["--quiet"]),
        (["--max_line_width", "42"], ["--max-line-width", "42"]),
        (["--diarize", "a.wav"], ["--speakers", "auto", "a.wav"]),
        (["--vad_filter", "True", "a.wav"], ["a.wav"]),
        (["--vad-filter", "a.wav"], ["a.wav"]),
        (["--", "--output_dir"], ["--", "--output_dir"]),
    ],
)
def test_an_option_of_whisper_is_read_as_ours(theirs: list[str], ours: list[str]) -> None:
    assert in_our_spelling(theirs) == ours


@pytest.mark.parametrize(
    ("given", "formats"),
    [("txt", ("text",)), ("tsv", ("tsv",)), ("all", ("text", "srt", "vtt", "tsv", "verbose_json"))],
)
def test_formats_may_have_whispers_names(given: str, formats: tuple[str, ...]) -> None:
    context = command.make_context("transcribe", ["a.wav", "--output_format", given, "--output_dir", "out"])
    assert context.params["formats"] == formats


@pytest.mark.slow
def test_a_whole_command_line_of_whisper_writes_all_its_files(tmp_path: Path) -> None:
    recording, out = record(tmp_path / "a.wav"), tmp_path / "out"
    theirs = (
        f"--output_format all --output_dir {out} --language en --task transcribe --initial_prompt Digits. "
        "--word_timestamps True --threads 2 --condition_on_previous_text False --fp16 False --beam_size 5 "
        "--hotwords one,two"
    )
    done = transcribe_here(recording, *theirs.split())
    assert done.returncode == 0, said(done)
    endings = ("srt", "tsv", "txt", "verbose.json", "vtt")
    assert sorted(path.name for path in out.iterdir()) == [f"a.{ending}" for ending in endings]
    assert heard((out / "a.txt").read_text())
    assert (out / "a.tsv").read_text().startswith("start\tend\ttext\n")
    assert json.loads((out / "a.verbose.json").read_text())["words"]


@pytest.mark.parametrize(
    ("given", "clips"),
    [
        (["90-120"], [(90.0, 120.0)]),
        (["1:30-2:00.5"], [(90.0, 120.5)]),
        (["1:02:30-"], [(3750.0, math.inf)]),
        (["10-20", "0-5"], [(0.0, 5.0), (10.0, 20.0)]),
        (["10-20,15-30,30-40"], [(10.0, 40.0)]),
    ],
)
def test_clips_are_seconds_or_times_in_order(given: list[str], clips: list[tuple[float, float]]) -> None:
    arguments = [word for text in given for word in ("--clip", text)]
    found = command.make_context("transcribe", ["a.wav", *arguments]).params["clips"]
    assert found == tuple(Clip(*clip) for clip in clips)
