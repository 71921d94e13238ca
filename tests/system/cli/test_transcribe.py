"""`asr-server transcribe` as its user meets it: real processes, the embedded model, real recordings."""

import asyncio
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import soundfile
from click.testing import CliRunner, Result

from asr_server.annexes.offline.run import INTERRUPTED, TERMINATED
from asr_server.cli import main
from asr_server.cli.transcribe import EMBEDDED_HINT
from asr_server.core import SAMPLE_RATE
from tests.conftest import Server
from tests.contract.test_documented_names import DOCS, rows_of
from tests.support.speech import digits_of, errors_in, say
from tests.support.until import until, wait_until
from tests.unit.api.running_app import SECOND, run_app
from tests.unit.checkpoint.fake_hub import running_hub

COMMAND = [sys.executable, "-m", "asr_server", "transcribe"]
DIGITS = "3141592"


def transcribe(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=b"",
        env=os.environ | environment,
        capture_output=True,
        timeout=200,
        check=False,
    )


def transcribe_here(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run the command and its engine in this process, which has torch already."""
    words = ["transcribe", "--executor", "inline", *map(str, arguments)]
    done = CliRunner().invoke(main, words)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout_bytes, done.stderr_bytes)


def said(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """The lines on standard error, without the hint about the embedded model."""
    lines = done.stderr.decode().splitlines()
    return [line for line in lines if line != EMBEDDED_HINT]


def record(path: Path, digits: str = DIGITS, seconds_of_silence: float = 0.5) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, say(digits, lead_s=seconds_of_silence).samples, SAMPLE_RATE)
    return path


def heard(text: str) -> bool:
    """Whether it is what was said, give or take one digit: the model is a small one."""
    return errors_in(digits_of(text), DIGITS) <= 1


def test_a_folder_with_all_that_can_go_wrong_loses_no_word(tmp_path: Path) -> None:
    """Two recordings of one name, a name that is not ASCII, an empty file, one that is no audio, a missing
    one; under a locale that knows only ASCII. Then the same again: nothing is done twice.
    """
    folder, out = tmp_path / "in", tmp_path / "out"
    record(folder / "a.wav")
    record(folder / "a.flac")
    record(folder / "grüße" / "a.wav")
    (folder / "empty.wav").write_bytes(b"")
    (folder / "noise.mp3").write_bytes(b"this is no audio" * 1000)
    arguments: list[str | Path] = [folder, "missing.wav", "-r", "-f", "srt,json", "-f", "text", "-o", out]
    done = transcribe(
        *arguments, LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0", PYTHONIOENCODING="ascii"
    )
    lines = said(done)
    assert done.returncode == 1
    assert done.stdout == b""
    names = ("a.wav", "a.flac", "grüße/a")
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert found == sorted(f"{name}.{ending}" for name in names for ending in ("srt", "json", "txt"))
    for name in names:
        assert heard((out / f"{name}.txt").read_text())
        assert heard(json.loads((out / f"{name}.json").read_text())["text"])
        assert " --> " in (out / f"{name}.srt").read_text()
    assert lines[-1].startswith("3 transcribed, 3 failed; ")
    failures = [line for line in lines if line.startswith("failed: ")]
    assert failures[0] == "failed: missing.wav: No such file or directory"
    assert {line.split(": ")[1] for line in failures[1:]} == {f"{folder}/empty.wav", f"{folder}/noise.mp3"}
    assert "Traceback" not in done.stderr.decode()

    again = transcribe_here(folder, *arguments[2:], "--skip-existing")
    assert said(again)[-1] == "3 skipped, 2 failed"
    refused = transcribe_here(folder / "a.wav", "-f", "text", "-o", out / "grüße")
    assert refused.returncode == 1
    assert said(refused)[0].endswith("a.txt exists: --skip-existing leaves it, --overwrite replaces it")


def test_on_a_terminal_a_bar_knows_how_long_the_recording_is_and_the_log_has_the_level_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = record(tmp_path / "a.mp3", DIGITS * 3)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich takes standard error for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    done = transcribe_here(recording, "--log-level", "info")
    assert done.returncode == 0
    length_s = round(soundfile.info(recording).duration)
    assert re.search(rf"0:00:\d\d of 0:00:{length_s:02}", done.stderr.decode())
    assert any("INFO" in line and "serving whisper-digits" in line for line in said(done))


@pytest.mark.parametrize(
    ("number", "num_presses", "reason"),
    [
        (signal.SIGINT, 1, "interrupted"),
        pytest.param(signal.SIGINT, 1000, "interrupted", marks=pytest.mark.trial),
        pytest.param(signal.SIGTERM, 1, "terminated", marks=pytest.mark.trial),
    ],
)
def test_an_interruption_keeps_what_is_done_and_leaves_nothing_else(
    tmp_path: Path, number: signal.Signals, num_presses: int, reason: str
) -> None:
    out = tmp_path / "out"
    short = record(tmp_path / "short.wav")
    long = record(tmp_path / "long.wav", DIGITS * 100)
    process = subprocess.Popen([*COMMAND, str(short), str(long), "-o", str(out)], stderr=subprocess.PIPE)
    try:
        wait_until(lambda: (out / "short.txt").exists() or process.poll() is not None)
        children = psutil.Process(process.pid).children(recursive=True)
        for _ in range(num_presses):
            process.send_signal(number)
            time.sleep(0.02)
            if process.poll() is not None:
                break
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert b"Traceback" not in errors
    assert os.listdir(out) == ["short.txt"]
    assert not psutil.wait_procs(children, timeout=30)[1]
    if num_presses > 1:
        assert process.returncode in (130, -signal.SIGINT)
        return
    assert process.returncode == 128 + number  # 130, or 143
    stopped, numbers = errors.decode().splitlines()[-2:]
    assert stopped == f"stopped: {reason}"
    assert numbers.startswith("1 transcribed, 1 not begun or not finished; ")


def test_a_reader_that_leaves_ends_it_in_one_line(server: Server, tmp_path: Path) -> None:
    command = [*COMMAND, str(record(tmp_path / "a.wav")), "-q", "--url", server.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 1
    assert errors == "stopped: cannot write to standard output: Broken pipe\n"


def test_a_closed_standard_output_is_said_in_one_line(server: Server, tmp_path: Path) -> None:
    recording = str(record(tmp_path / "a.wav"))
    command = ["sh", "-c", 'exec "$@" >&-', "", *COMMAND, recording, "-q", "--url", server.url]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert child.stderr == "stopped: cannot write to standard output: it is closed\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("--language", "klingon"),
            "Error: Language 'klingon' is not known to this model. Known: en (english).",
        ),
        (("--task", "translate"), "Error: The model whisper-digits cannot translate."),
        (
            ("--output-dir", f"{__file__}/out"),
            f"Error: cannot write to the output folder {__file__}/out: Not a directory",
        ),
        (("--model", "lage-v3"), "did you mean large-v3?"),
        (("--max-slots", "-3"), "--max-slots (ASR_SERVER_MAX_SLOTS) is '-3': must be"),
    ],
)
def test_what_is_wrong_for_all_is_status_2(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    done = transcribe_here(record(tmp_path / "a.wav"), *arguments)
    assert done.returncode == 2
    (told,) = said(done)
    assert line in told


def test_without_anything_to_transcribe_no_engine_is_started() -> None:
    done = transcribe_here("missing.wav", "--quiet")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"failed: missing.wav: No such file or directory\n"


def test_each_channel_of_a_call_is_a_speaker_and_mono_fails_alone(server: Server, tmp_path: Path) -> None:
    left, right = say("314").samples, say("271", lead_s=3.0).samples
    samples = np.zeros((max(len(left), len(right)), 2), np.float32)
    samples[: len(left), 0], samples[: len(right), 1] = left, right
    soundfile.write(tmp_path / "call.wav", samples, SAMPLE_RATE)
    formats = ("-f", "srt,diarized_json", "-o", tmp_path, "--url", server.url)
    inputs = (record(tmp_path / "mono.wav"), tmp_path / "call.wav")
    done = transcribe(*inputs, "--channels", "split", "--speakers", "agent, caller", *formats)
    assert done.returncode == 1
    assert "mono.wav: channels=split takes files of two channels" in done.stderr.decode()
    assert "\nagent: three one four\n" in (tmp_path / "call.srt").read_text()
    body = json.loads((tmp_path / "call.diarized.json").read_text())
    assert [(each["speaker"], each["text"]) for each in body["segments"]] == [
        ("agent", "three one four"),
        ("caller", "two seven one"),
    ]


LIMIT_S = 60.0


def test_help_and_docs_name_the_same_statuses() -> None:
    text = " ".join(CliRunner().invoke(main, ["transcribe", "--help"]).output.split())
    (told,) = re.findall(r"Exit status: (.*?)\.", text)
    documented = [
        number for cell, *_ in rows_of(DOCS / "command-line.md", "exit status") for number in cell.split(", ")
    ]
    assert re.findall(r"\d+", told) == documented
    assert [int(number) for number in documented[-2:]] == [INTERRUPTED, TERMINATED]


def test_a_run_that_skips_all_as_asked_has_status_0(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a result\n")
    done = transcribe_here(record(tmp_path / "a.wav"), "-o", tmp_path, "--skip-existing")
    assert done.returncode == 0
    assert done.stderr.decode().splitlines()[-1] == "1 skipped"


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.trial)],
)
def test_a_signal_while_the_model_is_fetched_ends_it_without_a_traceback(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """TERM ends the process by itself, which a shell calls 143."""
    with running_hub(tmp_path) as hub:
        hub.silent = threading.Event()
        process = subprocess.Popen(
            [*COMMAND, str(record(tmp_path / "a.wav")), "--model", "someone/pocket"],
            env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: hub.requests or process.poll() is not None)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status
    assert "Traceback" not in errors
    assert ("stopped: interrupted" in errors) == (number == signal.SIGINT)


SPOKEN = say("314159", gap_s=[0.2, 0.2, 1.2, 0.2, 0.2, 0.5])
ENDINGS = {"text": "txt", "json": "json", "verbose_json": "verbose.json", "srt": "srt", "vtt": "vtt"}
WORDS = {"timestamp_granularities[]": ["segment", "word"]}


def call(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner().invoke(main, ["transcribe", *map(str, arguments)], env=environment)


def record_spoken(path: Path) -> Path:
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
    recording = record_spoken(tmp_path / "a.wav")
    for formats in ("text,json,verbose_json", "srt,vtt"):  # word times of subtitles change those of segments
        done = call(recording, "--url", server.url, "-f", formats, "-o", tmp_path)
        assert done.exit_code == 0, done.output
    for response_format, ending in ENDINGS.items():
        written = (tmp_path / f"a.{ending}").read_bytes()
        assert written == servers_own(server, recording, response_format)
    assert (tmp_path / "a.txt").read_text() == f"{SPOKEN.text}\n"
    written_to = ", ".join(str(tmp_path / f"a.{ending}") for ending in ("srt", "vtt"))
    assert done.stderr.endswith(f" x) -> {written_to}\n")


def test_words_keep_their_segments_and_their_spaces(server: Server, tmp_path: Path) -> None:
    recording = record_spoken(tmp_path / "a.wav")
    layout = {"max_line_width": 14, "max_line_count": 2, "highlight_words": "true"}
    flags = ("--max-line-width", "14", "--max-line-count", "2", "--highlight-words", "--word-timestamps")
    done = call(recording, "--url", f"{server.url}/v1/", "-f", "srt,verbose_json", "-o", tmp_path, *flags)
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
def test_an_address_or_key_that_is_wrong_is_status_2(
    server: Server, tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    done = call(record_spoken(tmp_path / "a.wav"), "--url", server.url, *arguments)
    assert done.exit_code == 2
    assert line in done.stderr.splitlines()[-1]


def test_a_server_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    done = call(record_spoken(tmp_path / "a.wav"), "--url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert done.stderr.startswith("stopped: cannot reach http://127.0.0.1:1/v1/models: ")
    assert done.stderr.endswith("1 not begun or not finished\n")


# -- A server that is killed in the middle -------------------------------------------------------------------

RESTART_LIMIT_S = 100
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
        _, errors = await asyncio.to_thread(running.communicate, timeout=RESTART_LIMIT_S)
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
        done = call(record_spoken(tmp_path / "a.wav"), "--url", f"http://127.0.0.1:{hostile.server_port}")
        hostile.shutdown()
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(r"Error: no\x1b]0;owned\x07\r\nError: forged")
    assert len(line) < 3000
