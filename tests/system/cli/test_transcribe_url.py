"""`asr-server transcribe --url` on a real server: what it writes is what the server would have written."""

import asyncio
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import soundfile
from click.testing import CliRunner, Result

from asr_server.cli import main
from asr_server.core import SAMPLE_RATE
from tests.conftest import Server
from tests.support.speech import say
from tests.support.until import until
from tests.unit.api.running_app import SECOND, run_app

SPOKEN = say("314159", gap_s=[0.2, 0.2, 1.2, 0.2, 0.2, 0.5])
ENDINGS = {"text": "txt", "json": "json", "verbose_json": "verbose.json", "srt": "srt", "vtt": "vtt"}
WORDS = {"timestamp_granularities[]": ["segment", "word"]}


def transcribe(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(main, ["transcribe", *map(str, arguments)], env=environment)


def record(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    soundfile.write(path, SPOKEN.samples, SAMPLE_RATE)
    return path


def servers_own(server: Server, recording: Path, response_format: str, **fields: object) -> bytes:
    """What the server writes in that format itself, with the line break of a text file."""
    data = {"model": "whisper-1", "response_format": response_format, **fields}
    files = {"file": recording.read_bytes()}
    reply = httpx.post(f"{server.url}/v1/audio/transcriptions", data=data, files=files, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.content.rstrip(b"\n") + b"\n"


def test_every_format_is_what_the_server_would_have_written(server: Server, tmp_path: Path) -> None:
    recording = record(tmp_path / "a.wav")
    for formats in ("text,json,verbose_json", "srt,vtt"):  # word times of subtitles change those of segments
        done = transcribe(recording, "--url", server.url, "-f", formats, "-o", tmp_path)
        assert done.exit_code == 0, done.output
    for response_format, ending in ENDINGS.items():
        written = (tmp_path / f"a.{ending}").read_bytes()
        assert written == servers_own(server, recording, response_format)
    assert (tmp_path / "a.txt").read_text() == f"{SPOKEN.text}\n"
    written_to = ", ".join(str(tmp_path / f"a.{ending}") for ending in ("srt", "vtt"))
    assert done.stderr.endswith(f" x) -> {written_to}\n")


def test_words_keep_their_segments_and_their_spaces(server: Server, tmp_path: Path) -> None:
    recording = record(tmp_path / "a.wav")
    layout = {"max_line_width": 14, "max_line_count": 2, "highlight_words": "true"}
    flags = ("--max-line-width", "14", "--max-line-count", "2", "--highlight-words", "--word-timestamps")
    done = transcribe(
        recording, "--url", f"{server.url}/v1/", "-f", "srt,verbose_json", "-o", tmp_path, *flags
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.srt").read_bytes() == servers_own(server, recording, "srt", **layout)
    assert (tmp_path / "a.verbose.json").read_bytes() == servers_own(
        server, recording, "verbose_json", **WORDS
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--language", "klingon"), "Error: Language 'klingon' is not known to this model."),
        (("--model", "turbo"), "Error: The model 'turbo' does not exist."),
        (("--task", "translate"), "cannot translate."),
        (("--device", "cuda"), "Error: --device is for this machine: it does not go with --url."),
        (("--url", "nowhere"), "Error: --url 'nowhere' is no address of a server"),
    ],
)
def test_what_is_wrong_for_all_is_status_2(
    server: Server, tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    done = transcribe(record(tmp_path / "a.wav"), "--url", server.url, *arguments)
    assert done.exit_code == 2
    assert line in done.stderr.splitlines()[-1]


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    done = transcribe(record(tmp_path / "a.wav"), "--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.startswith("stopped: cannot reach http://127.0.0.1:1/v1/models: ")
    assert done.stderr.endswith("1 not begun or not finished\n")


# -- A server that is killed in the middle -------------------------------------------------------------------

LIMIT_S = 100
NUM_FILES = 20  # more than are under way at once


def begin(folder: Path, url: str, output_dir: Path, *flags: str) -> subprocess.Popen[str]:
    arguments = ("transcribe", folder, "--url", url, "-o", output_dir, *flags)
    return subprocess.Popen(
        [sys.executable, "-m", "asr_server", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def texts_in(folder: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]


async def test_files_in_flight_are_sent_again_to_the_server_that_comes_in_its_place(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(NUM_FILES):
        (folder / f"{number:02}.wav").write_bytes(SECOND)
    async with run_app() as first:
        first.replica.holding = True
        running = begin(folder, f"http://{first.host}:{first.port}", out)
        await until(lambda: len(first.replica.held) == 16)
        for submit in first.replica.held[:3]:
            first.replica.release(submit)
        await until(lambda: len(texts_in(out)) == 3)
        first.cut_off()
    async with run_app(port=first.port) as second:
        _, errors = await asyncio.to_thread(running.communicate, timeout=LIMIT_S)
        assert running.returncode == 0, errors
        assert len(second.replica.submits) == NUM_FILES - 3
    assert texts_in(out) == ["zero"] * NUM_FILES
    assert f"\n{NUM_FILES} transcribed; " in errors


class HostileServer(http.server.BaseHTTPRequestHandler):
    """Refuses with a message that would command a terminal and forge a line."""

    def do_GET(self) -> None:
        body = json.dumps(
            {"error": {"message": "no\x1b]0;owned\x07\r\nError: forged" + "x" * 100_000}}
        ).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_what_a_hostile_server_answers_is_printed_in_one_line_without_commands(tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), HostileServer) as hostile:
        threading.Thread(target=hostile.serve_forever, daemon=True).start()
        done = transcribe(record(tmp_path / "a.wav"), "--url", f"http://127.0.0.1:{hostile.server_port}")
        hostile.shutdown()
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(r"Error: no\x1b]0;owned\x07\r\nError: forged")
    assert len(line) < 3000
