"""The command line of openai-whisper, read as ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asr_server.cli.arguments import in_our_spelling
from asr_server.cli.transcribe import transcribe as command
from tests.system.cli.test_transcribe import heard, record, said, transcribe


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
    theirs: list[str | Path] = [
        "--output_format",
        "all",
        "--output_dir",
        out,
        "--language",
        "en",
        "--task",
        "transcribe",
    ]
    theirs += ["--initial_prompt", "Digits.", "--word_timestamps", "True", "--threads", "2"]
    theirs += [
        "--condition_on_previous_text",
        "False",
        "--fp16",
        "False",
        "--beam_size",
        "5",
        "--hotwords",
        "one,two",
    ]
    done = transcribe(recording, *theirs)
    assert done.returncode == 0, said(done)
    endings = ("srt", "tsv", "txt", "verbose.json", "vtt")
    assert sorted(path.name for path in out.iterdir()) == [f"a.{ending}" for ending in endings]
    assert heard((out / "a.txt").read_text())
    assert (out / "a.tsv").read_text().startswith("start\tend\ttext\n")
    assert json.loads((out / "a.verbose.json").read_text())["words"]
