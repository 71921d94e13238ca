"""`--clip START-END`: how it is written, and what it gives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import soundfile
from click.testing import CliRunner

from asr_server.cli import main
from asr_server.cli.transcribe import transcribe as command
from asr_server.core import SAMPLE_RATE, Clip
from tests.support.speech import digits_of, errors_in, say
from tests.system.cli.test_transcribe import transcribe_here


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
def test_clips_are_seconds_or_clock_times_in_order(
    given: list[str], clips: list[tuple[float, float]]
) -> None:
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


@pytest.mark.slow
def test_a_clip_is_transcribed_with_the_times_of_the_file(tmp_path: Path) -> None:
    said = say("31415926")
    soundfile.write(tmp_path / "a.wav", said.samples, SAMPLE_RATE)
    start_s = said.times[4][0] - 0.1
    done = transcribe_here(
        tmp_path / "a.wav", "--clip", f"{start_s:.2f}-", "--format", "verbose_json", "--word-timestamps"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert errors_in(digits_of(found["text"]), "5926") <= 1
    assert found["words"][0]["start"] == pytest.approx(said.times[4][0], abs=0.4)
    assert found["duration"] == pytest.approx(len(said.samples) / SAMPLE_RATE, abs=0.1)
