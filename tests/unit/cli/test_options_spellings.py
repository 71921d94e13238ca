"""The command line of openai-whisper, read as ours; how `--clip START-END` is written."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from asr_server.cli import main
from asr_server.cli.options import in_our_spelling
from asr_server.cli.transcribe import transcribe as command
from asr_server.core import Clip
from tests.system.cli.test_transcribe import heard, record, said, transcribe_here


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clip", "90"], "'90' is no START-END, such as 90-120"),
        (["--clip", "1:30-1:10"], "'1:30-1:10' ends before it begins"),
        (["--clip", "5-5"], "'5-5' ends before it begins"),
        (["--clip", "0-5", "--url", "http://x"], "--clip is for this machine"),
    ],
)
def test_a_clip_that_is_none_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["transcribe", "a.wav", *arguments])
    assert result.exit_code == 2
    assert message in result.output
