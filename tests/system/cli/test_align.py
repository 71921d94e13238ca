"""`asr-server align`: subtitles of a text that is at hand."""

import json
from pathlib import Path

import pytest
import soundfile
from click.testing import CliRunner, Result

from asr_server.cli import main
from asr_server.core import SAMPLE_RATE
from tests.support.speech import say

SPOKEN = say("38172", gap_s=0.4)


def align(folder: Path, text: str | bytes, *options: str) -> Result:
    recording, script = folder / "talk.wav", folder / "talk.txt"
    soundfile.write(recording, SPOKEN.samples, SAMPLE_RATE)
    script.write_bytes(text if isinstance(text, bytes) else text.encode())
    command = ["align", str(recording), str(script), "--executor", "inline", "--model", "whisper-digits"]
    return CliRunner().invoke(main, [*command, *options])


@pytest.mark.slow
def test_subtitles_have_the_text_as_it_is_written(tmp_path: Path) -> None:
    done = align(tmp_path, "Three, eight; one: Seven two!")
    assert (done.exit_code, done.stderr) == (0, "")
    number, times, *lines = done.stdout.splitlines()
    assert (number, " ".join(lines).strip()) == ("1", "Three, eight; one: Seven two!")
    assert times.startswith("00:00:00,")


@pytest.mark.slow
def test_what_is_not_spoken_is_left_out_and_counted(tmp_path: Path) -> None:
    output = tmp_path / "talk.vtt"
    text = f"Here somebody counts for us all day long. {SPOKEN.text}"
    done = align(tmp_path, text, "--format", "vtt", "--output", str(output))
    assert (done.exit_code, done.stdout) == (0, "")
    assert "8 words of the text are not spoken" in done.stderr
    subtitles = output.read_text()
    assert subtitles.startswith("WEBVTT")
    assert "Here" not in subtitles


@pytest.mark.slow
def test_json_has_the_body_of_the_api(tmp_path: Path) -> None:
    done = align(tmp_path, SPOKEN.text, "--format", "json", "--granularity", "character")
    body = json.loads(done.stdout)
    assert "".join(each["character"] for each in body["characters"]) == SPOKEN.text.replace(" ", "")


@pytest.mark.parametrize(("text", "status", "says"), [("...", 1, "no word"), (b"\xff\xfe", 2, "UTF-8")])
def test_without_text_nothing_is_aligned(tmp_path: Path, text: str | bytes, status: int, says: str) -> None:
    done = align(tmp_path, text)
    assert done.exit_code == status
    assert says in done.stderr
