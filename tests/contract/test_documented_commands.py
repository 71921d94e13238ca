"""Commands and snippets of the docs run as they are printed, but for names of hosts and of larger models."""

import asyncio
import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from asr_server.annexes.keys.api_keys import SHORT
from asr_server.cli import main
from asr_server.cli.transcribe import EMBEDDED_HINT
from asr_server.core import SAMPLE_RATE
from tests.conftest import Server
from tests.contract.test_documentation import LOCAL, PAGES, README, ROOT, blocks_of
from tests.support.commands import run_command
from tests.support.speech import digits_of, say
from tests.unit.audio.audio_files import write_ffmpeg

DOCS = ROOT / "docs"
LIMIT_S = 100
SPOKEN = say("314", lead_s=0.3)
CALL = say("271", lead_s=2.5)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings that the pages speak of, and the programs in `bin`."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("recordings", "examples", "bin"):
        (folder / name).mkdir()
    samples = SPOKEN.samples[:, None]
    for name in ("meeting.m4a", "talk.m4a", "recordings/one.m4a"):
        write_ffmpeg(folder / name, samples, SAMPLE_RATE, "aac", "mp4")
    for name in ("talk.wav", "examples/speech.wav", "recordings/two.wav"):
        soundfile.write(folder / name, samples, SAMPLE_RATE)
    stereo = np.zeros((max(len(SPOKEN.samples), len(CALL.samples)), 2), np.float32)
    stereo[: len(SPOKEN.samples), 0], stereo[: len(CALL.samples), 1] = SPOKEN.samples, CALL.samples
    soundfile.write(folder / "call.wav", stereo, SAMPLE_RATE)
    lines = ({"audio": "talk.wav"}, {"audio": "gone.wav", "id": "second"}, {"audio": "meeting.m4a"})
    (folder / "files.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_program(folder / "bin" / "asr-server", f'exec {sys.executable} -m asr_server "$@"')
    write_program(folder / "bin" / "ffmpeg", "exec cat talk.wav")  # not everybody has it
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    return folder


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


Run = Callable[..., str]


@pytest.fixture
def run(desk: Path, server: Server) -> Run:
    """Runs a line of the shell on the desk, and returns what it prints."""

    def run(line: str, status: int = 0) -> str:
        for named, real in {
            LOCAL: server.url,
            "http://gpu-host:8000": server.url,
            "turbo": "whisper-digits",
        }.items():
            line = line.replace(named, real)
        environment = os.environ | {
            "PATH": f"{desk / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CURL_HOME": str(desk),
        }
        done = run_command("bash", "-c", line, cwd=desk, env=environment, timeout=LIMIT_S)
        assert done.returncode == status, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


Call = Callable[..., Result]


@pytest.fixture
def call(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a call of asr-server on the desk, in this process, which has loaded torch already."""
    monkeypatch.chdir(desk)
    monkeypatch.setenv("ASR_SERVER_EXECUTOR", "inline")

    def call(line: str, status: int = 0) -> Result:
        program, *words = shlex.split(line.replace("turbo", "whisper-digits"), comments=True)
        done = CliRunner().invoke(main, words)
        assert (program, done.exit_code) == ("asr-server", status), f"{line}\n{done.output}"
        return done

    return call


def lines_of(page: Path) -> Iterator[str]:
    for block in blocks_of(page):
        yield from block.replace("\\\n", " ").splitlines()


def calls_of_curl(page: Path) -> list[str]:
    """`...` is what the first call on the page has before its file, and the file."""
    calls = [
        line.removeprefix("$ ") for line in lines_of(page) if line.removeprefix("$ ").startswith("curl ")
    ]
    whole = calls[0].partition("#")[0]
    return [call.replace("curl ...", whole.rstrip()) for call in calls]


@pytest.mark.parametrize("page", [README, DOCS / "api.md", DOCS / "speakers.md"], ids=lambda page: page.name)
def test_each_call_of_curl_gives_what_it_asks_for(page: Path, run: Run) -> None:
    for call in calls_of_curl(page):
        answer = run(call)
        form = dict(re.findall(r"-F '?([\w\[\]]+)=(\w+)", call))
        match form:
            case {"stream": "true"}:
                text = json.loads(answer.strip().splitlines()[-3 if "[DONE]" in answer else -1][6:])["text"]
            case {"response_format": "srt" | "vtt"}:
                text = answer.split("\n")[2]
                assert " --> " in answer
            case {"response_format": "diarized_json"}:
                body = json.loads(answer)
                assert [segment["speaker"] for segment in body["segments"]] == ["A", "B"]
                text = body["segments"][0]["text"]
            case _:
                body = json.loads(answer)
                text = body["text"]
                assert ("words" in body) == ("timestamp_granularities[]" in form)
        assert digits_of(text) == "314", call


RUN_ELSEWHERE = {
    "make serve": "here, as a dry run",
    "make transcribe": "here, as a dry run; its command in tests/contract/test_documentation.py",
    "asr-server serve turbo": "tests/contract/test_documentation.py, but for the model",
    "asr-server serve --models": "tests/unit/cli/test_serve_calls.py",
    "asr-server transcribe examples": "tests/contract/test_documentation.py",
    "asr-server transcribe talk.m4a --model ggml-small.bin": "tests/unit/checkpoint/test_adopt.py",
    "asr-server align talk.mp3 talk.txt": "tests/system/cli/test_align.py",
    "asr-server models": "tests/system/cli/test_default_model.py",
    "asr-server transcribe --manifest /shared/files.jsonl": "tests/cluster/test_manifest_ray.py",
    "asr-server transcribe meeting.m4a --speakers auto": "tests/unit/speakers/test_track.py",
    ".venv/bin/pip install": "the extras are looked up in tests/contract/test_documented_names.py",
    "OTEL_EXPORTER_OTLP_ENDPOINT=": "tests/system/api/test_traces.py",
    "ray start": "tests/cluster/ray_cluster.py",
    "docker run": "its flags are looked up in tests/contract/test_documented_names.py: no test has docker",
    "helm install": "tests/toolchain/deploy/test_manifests.py, as a template",
    "kubectl apply": "tests/toolchain/deploy/test_manifests.py, as a template",
}
RUN_HERE = (
    *("curl ", "asr-server transcribe ", "asr-server serve --port 70000 "),
    *("KEY=$(openssl ", "printf "),
)


def test_each_command_of_the_docs_is_run_or_has_its_place_here() -> None:
    programs = r"curl|make|asr-server|ray|docker|\.venv/bin/pip|ffmpeg|helm|kubectl|printf|\w+=\S+"
    called = rf"(?:\$ )?(?:\.venv/bin/(?=asr-server))?((?:{programs}) .*)"
    commands = [match[1] for page in PAGES for line in lines_of(page) if (match := re.match(called, line))]
    assert len(commands) > 25
    known = (*RUN_ELSEWHERE, *RUN_HERE, "ffmpeg -i talk.mkv")
    assert [command for command in commands if not command.startswith(known)] == []
    assert [start for start in RUN_ELSEWHERE if not any(each.startswith(start) for each in commands)] == []
    for path in re.findall(r"tests/[\w/]+\.py", " ".join(RUN_ELSEWHERE.values())):
        assert (ROOT / path).exists(), path


def test_make_calls_the_command_with_what_it_is_given() -> None:
    """By its dry run, which says which command it would call."""
    serve, transcribe = [line.partition("#")[0] for line in lines_of(README) if line.startswith("make ")]
    # A make that runs the tests hands its own ARGS= down to every make below it, as a flag and as a variable.
    handed_down = {"MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS", "FILE"}
    environment = {name: value for name, value in os.environ.items() if name not in handed_down}
    for target, wanted in ((serve, "serve"), (transcribe, "transcribe")):
        words = [*shlex.split(target), "--dry-run", "--no-print-directory", "--directory", str(ROOT)]
        *_, last = subprocess.check_output(words, env=environment, text=True, timeout=LIMIT_S).splitlines()
        program, command, *given = shlex.split(last)
        assert (program, command) == (".venv/bin/asr-server", wanted)
    assert given == ["--", *re.findall(r"FILE=(\S+)", transcribe)]


def test_the_calls_of_transcribe_do_what_is_written_beside_them(run: Run, call: Call, desk: Path) -> None:
    alone, folder, pipe, elsewhere = blocks_of(DOCS / "command-line.md")[0].splitlines()
    hint, text, speed = call(alone).output.splitlines()  # and nothing else of one recording
    assert (hint, digits_of(text)) == (EMBEDDED_HINT, "314")
    assert speed.startswith("meeting.m4a: ")
    assert call(folder).stdout == ""
    names = {"one.srt", "one.json", "two.srt", "two.json"}
    assert {path.name for path in (desk / "subtitles").iterdir()} == names
    assert digits_of(run(pipe)) == "314"
    first, _, second, _ = run(elsewhere).replace("\n\n", "\n").splitlines()
    assert [first, second] == ["==> recordings/one.m4a <==", "==> recordings/two.wav <=="]


def test_a_manifest_is_done_and_its_bad_line_is_found_by_the_offset(run: Run, call: Call, desk: Path) -> None:
    page = (DOCS / "command-line.md").read_text()
    (line,) = [line for line in lines_of(DOCS / "command-line.md") if "--manifest" in line]
    call(line, status=1)
    names = {path.name for path in (desk / "results").glob("*/*")}
    assert names == {"talk.wav.json", "meeting.m4a.json"}
    (error,) = map(json.loads, (desk / "results" / "errors.jsonl").read_text().splitlines())
    assert list(error) == re.findall(r'"(\w+)": ', re.findall(r'`(\{"offset".*?\})`', page)[0])
    shown = re.findall(r"`(tail -c .*?)`", page)[0]
    told = re.findall(r'"offset": (\d+)', page)[0]
    found = run(shown.replace(str(int(told) + 1), str(error["offset"] + 1)))
    assert json.loads(found)["id"] == error["id"] == "second"


def test_a_key_is_made_and_its_hash_printed_as_shown(run: Run) -> None:
    make, print_hash, _ = next(
        block for block in blocks_of(DOCS / "keys.md") if "openssl" in block
    ).splitlines()
    printed, key = run(f'{make}; {print_hash}; echo "$KEY"').splitlines()
    assert printed.split()[0] == hashlib.sha256(key.encode()).hexdigest()
    assert len(key) >= SHORT


def test_the_summary_has_lines_as_shown(call: Call, desk: Path) -> None:
    """With other names and numbers: of a whole, a cut and a silent recording, and of one that is none."""
    shown = blocks_of(DOCS / "command-line.md")[1].splitlines()
    recordings = desk / "told"
    recordings.mkdir()
    soundfile.write(recordings / "talk.wav", SPOKEN.samples, SAMPLE_RATE)
    soundfile.write(recordings / "rain.wav", np.zeros(2 * SAMPLE_RATE, np.float32), SAMPLE_RATE)
    (recordings / "call.wav").write_bytes((recordings / "talk.wav").read_bytes()[:-2001])
    (recordings / "notes.mp3").write_text("no audio")
    said = call("asr-server transcribe told -f srt -o srts", status=1).output.splitlines()
    for line in shown:
        start = without_names(line.removesuffix("..."))
        assert any(without_names(each).startswith(start) for each in said), line


def without_names(line: str) -> str:
    """Without what differs: names of files and models, and lengths such as 812.4."""
    return re.sub(r"model \S+|\S+\.\w+", "NAME", line)


def test_a_call_is_transcribed_by_its_speakers(call: Call) -> None:
    (line,) = [line for line in lines_of(DOCS / "speakers.md") if "--channels split" in line]
    agent, caller = re.findall(r"(agent|caller): (.*)", call(line).stdout)
    assert (agent[0], digits_of(agent[1])) == ("agent", "314")
    assert (caller[0], digits_of(caller[1])) == ("caller", "271")


def test_wrong_settings_are_told_as_shown() -> None:
    (shown,) = [block for block in blocks_of(DOCS / "operations.md") if "Error: " in block]
    asked, _, told = shown.removeprefix("$ asr-server ").partition("\n")
    done = CliRunner().invoke(main, shlex.split(asked))
    assert (done.exit_code, done.output) == (2, told)


def test_the_log_has_lines_as_shown(run: Run, server: Server) -> None:
    """With numbers and names of any kind."""
    blocks = [*blocks_of(DOCS / "operations.md"), *blocks_of(DOCS / "monitoring.md")]
    started, asked = [block for block in blocks if block.startswith(("serving ", "POST "))]
    run(calls_of_curl(README)[0])
    log = server.written()
    for words in re.split(r"\S*[\d.]+\S*", " ".join(asked.split())[: asked.index(", fallbacks")]):
        assert words.strip(" ;,") in log
    for words in ("serving", "device", "dtype", "slots", "threads", "replicas"):
        assert re.search(rf"\b{words} ", started)
        assert re.search(rf"serving .*\b{words} |\b{words} whisper-digits", log)


async def test_the_snippet_of_a_live_session_prints_what_was_said(server: Server) -> None:
    (snippet,) = blocks_of(DOCS / "realtime.md", "python")
    printed: list[tuple[str, str]] = []
    done = asyncio.Event()

    def keep(kind: str, text: str) -> None:
        printed.append((kind, text))
        if kind.endswith("transcription.completed"):
            done.set()

    samples = soundfile_at_24_khz()
    names: dict[str, Any] = {"print": keep, "base64_of_24_khz_pcm": samples}
    body = textwrap.indent(snippet.replace(LOCAL, server.url), "    ")
    exec(f"from openai import AsyncOpenAI\nasync def session():\n{body}", names)
    running = asyncio.create_task(names["session"]())
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert digits_of(printed[-1][1]) == "314"
    assert "session.updated" in {kind for kind, _ in printed}


def soundfile_at_24_khz() -> str:
    """Digits and a second of silence, in which the server finds the turn's end."""
    samples = np.concatenate([SPOKEN.samples, np.zeros(SAMPLE_RATE, np.float32)])
    times = np.arange(0, len(samples) - 1, SAMPLE_RATE / 24_000)
    pcm = (np.interp(times, np.arange(len(samples)), samples) * 32767).astype("<i2")
    return base64.b64encode(pcm.tobytes()).decode()
