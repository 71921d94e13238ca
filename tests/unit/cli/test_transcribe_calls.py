"""The flags of `asr-server transcribe`: what is refused, and what the others ask for."""

import logging
import signal
import sys
from dataclasses import replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from asr_server.annexes.offline.local import TranscribeJob
from asr_server.annexes.offline.outputs import OutputError
from asr_server.annexes.offline.remote import RemoteServer
from asr_server.cli import main
from asr_server.cli.transcribe import FORMATS
from asr_server.core import Clip, SpeakerCount
from asr_server.errors import CheckpointError, InvalidValue
from asr_server.formats import render
from asr_server.formats.render import ResponseFormat
from asr_server.formats.subtitles import SubtitleLayout
from asr_server.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a.wav", "--format", "srt,pdf"],
            "'pdf' is none of text, json, verbose_json, diarized_json, srt, vtt",
        ),
        (["a.wav", "--format", "srt,json"], "need --output-dir"),
        (["a.wav", "--skip-existing"], "need --output-dir"),
        (["a.wav", "--max-line-count", "2"], "--max-line-width"),
        (["a.wav", "-o", "x", "--skip-existing", "--overwrite"], "exclude each other"),
        (["a.wav", "--temperature", "2"], "2"),
        (["--manifest", __file__, "-o", "x", "--url", "http://x"], "--manifest is for this machine"),
        ([], "Give INPUT... or --manifest"),
        (["a.wav", "--manifest", __file__, "-o", "x"], "one of the two"),
        (["--manifest", __file__], "--manifest needs --output"),
        (["--manifest", "/dev/null", "-o", "out"], "is not a regular file"),
        (["--manifest", "missing.jsonl", "-o", "out"], "does not exist"),
        (["x", "-f", "diarized_json", "--task", "translate"], "does not go with a translation"),
        (["x", "--speakers", "auto"], "--speakers needs a format that shows them: --format srt, vtt,"),
        (["x", "--diarize", "--format", "text,json,tsv", "-o", "x"], "needs a format that shows them"),
        (["x", "-f", "srt", "--speakers", "agent,caller"], "names need --channels split"),
        (["x", "-f", "srt", "--speakers", "4-2"], "two such as 2-4"),
        (["x", "--channels", "split", "--speakers", "a"], "two different names"),
        (["x", "--channels", "split", "--speakers", "a,a"], "two different names"),
        (["x", "--clip", "90"], "'90' is no START-END, such as 90-120"),
        (["x", "--clip", "1:30-1:10"], "'1:30-1:10' ends before it begins"),
        (["x", "--clip", "5-5"], "'5-5' ends before it begins"),
    ],
)
def test_a_wrong_call_is_told_without_a_traceback(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["transcribe", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_the_formats_are_those_of_the_api_and_tsv() -> None:
    assert set(FORMATS) == {*render.FORMATS} == {*get_args(ResponseFormat), "tsv"}


# -- What flags ask for --------------------------------------------------------------------------------------


class Asked:
    """What a call asks of `asr_server.annexes.offline`, which does nothing here but answer `status`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status = 0
        self.error: BaseException | None = None
        self.by = ""
        self.job = TranscribeJob(())
        self.transcriber: Any = None  # settings, or a server elsewhere
        self.errors = ("", "")  # how standard error is encoded
        name = "transcribe_files"
        monkeypatch.setattr(f"asr_server.annexes.offline.run.{name}", partial(self._take, name))
        monkeypatch.setattr("asr_server.annexes.offline.run.transcribe_manifest", self._take_manifest)

    def _take(self, by: str, make_transcriber: Any, job: TranscribeJob) -> int:
        self.by, self.job, (self.transcriber,) = by, job, make_transcriber.args
        assert isinstance(sys.stderr, TextIOWrapper)
        self.errors = (sys.stderr.encoding, sys.stderr.errors or "")
        if self.error:
            raise self.error
        return self.status

    def _take_manifest(self, settings: ServerSettings, job: TranscribeJob) -> int:
        self.by, self.job, self.transcriber = "transcribe_manifest", job, settings
        return self.status

    def __call__(self, *arguments: str) -> Result:
        before = signal.getsignal(signal.SIGINT)
        try:
            return CliRunner().invoke(main, ["transcribe", *arguments])
        finally:
            self.on_interrupt = signal.signal(signal.SIGINT, before)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "")  # as it was before, afterwards
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    return Asked(monkeypatch)


PLAIN = TranscribeJob(("a.wav",))


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ([], {}),
        (["--format", "srt, json", "-f", "srt"], {"formats": ("srt", "json"), "output_dir": Path("out")}),
        (["--skip-existing"], {"existing": "skip", "output_dir": Path("out")}),
        (["--overwrite"], {"existing": "overwrite", "output_dir": Path("out")}),
        (["--recursive", "--quiet"], {"recursive": True, "quiet": True}),
        (["-l", "de", "--task", "translate"], {"language": "de", "task": "translate"}),
        (["--prompt", "a\udcffb"], {"prompt": "a\N{REPLACEMENT CHARACTER}b"}),
        (["--hotwords", "Anna,Ulm"], {"hotwords": ("Anna", "Ulm")}),
        (["--temperature", "1"], {"temperature": 1.0}),
        (["--word-timestamps", "--multilingual"], {"word_timestamps": True, "multilingual": True}),
        (["--condition-on-previous-text"], {"condition_on_previous_text": True}),
        (["--track", "2", "--clip", "1-2"], {"track": "2", "clips": (Clip(1.0, 2.0),)}),
        (["--subtitles", "raw"], {"layout": SubtitleLayout(raw=True)}),
        (["--max-line-width", "1", "--max-line-count", "1"], {"layout": SubtitleLayout(False, 1, 1)}),
        (["--max-words-per-line", "1"], {"layout": SubtitleLayout(max_words_per_line=1)}),
        (["--max-line-width", "9"], {"layout": SubtitleLayout(max_line_width=9)}),
        (["--highlight-words"], {"layout": SubtitleLayout(highlight_words=True)}),
        (["--format", "diarized_json"], {"formats": ("diarized_json",), "voices": SpeakerCount()}),
        (["-f", "srt", "--speakers", "auto"], {"formats": ("srt",), "voices": SpeakerCount()}),
        (["-f", "vtt", "--speakers", "1"], {"formats": ("vtt",), "voices": SpeakerCount(1, 1)}),
        (["-f", "srt", "--diarize"], {"formats": ("srt",), "voices": SpeakerCount()}),
        (
            ["--format", "diarized_json", "--speakers", "3"],
            {"formats": ("diarized_json",), "voices": SpeakerCount(3, 3)},
        ),
        (["--channels", "split"], {"speakers": ("A", "B")}),
        (["--channels", "split", "--speakers", " agent, caller"], {"speakers": ("agent", "caller")}),
    ],
)
def test_flags_become_a_job(asked: Asked, flags: list[str], changes: dict[str, Any]) -> None:
    folder = ["-o", "out"] if "output_dir" in changes else []
    done = asked("a.wav", *flags, *folder)
    assert (done.exit_code, asked.by) == (0, "transcribe_files"), done.output
    assert asked.job == replace(PLAIN, **changes)


def test_a_manifest_is_a_run_of_its_own(asked: Asked, tmp_path: Path) -> None:
    manifest = tmp_path / "files.jsonl"
    manifest.touch()
    out = tmp_path / "out"
    assert asked("--manifest", str(manifest), "-o", str(out), "--overwrite").exit_code == 0
    assert asked.by == "transcribe_manifest"
    assert asked.job == TranscribeJob((), output_dir=out, manifest=manifest, existing="overwrite")
    assert asked.transcriber.model_names[0] == "whisper-digits"


def test_settings_are_those_of_the_flags_and_the_log_is_quiet_unless_asked(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked("a.wav", "--beam-size", "3", "--no-check-voice")
    settings = asked.transcriber
    assert (settings.log_level, settings.beam_size, settings.check_voice) == ("error", 3, False)
    asked("a.wav", "--log-level", "info")
    assert asked.transcriber.log_level == "info"
    monkeypatch.setenv("ASR_SERVER_LOG_LEVEL", "debug")
    asked("a.wav")
    assert asked.transcriber.log_level == "debug"


def test_a_server_elsewhere_gets_its_model_and_key_and_none_of_this_machines_settings(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.root.setLevel(logging.WARNING)
    assert asked("a.wav", "--url", "http://x").exit_code == 0
    assert asked.transcriber == RemoteServer("http://x", "", "")
    assert logging.root.level == logging.ERROR
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert asked("a.wav", "--url", "http://x", "--model", "turbo", "--log-format", "json").exit_code == 0
    assert asked.transcriber == RemoteServer("http://x", "secret", "turbo")
    for flag in (["--device", "cpu"], ["--max-slots", "0"], ["--clip", "1-2"]):
        done = asked("a.wav", "--url", "http://x", *flag)
        assert done.exit_code == 2
        assert f"{flag[0]} is for this machine: it does not go with --url." in done.output


@pytest.mark.parametrize("status", [0, 1, 130, 143])
def test_the_status_is_the_runs_and_a_second_interruption_ends_it_now(asked: Asked, status: int) -> None:
    asked.status = status
    assert asked("a.wav").exit_code == status
    assert (asked.on_interrupt is signal.SIG_DFL) == (status == 130)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "stopped: interrupted"),
        (CheckpointError("no model"), 2, "Error: no model"),
        (InvalidValue("no language"), 2, "Error: no language"),
        (OutputError("no room"), 2, "Error: no room"),
    ],
)
def test_what_ends_a_run_early_is_a_line(asked: Asked, error: BaseException, status: int, line: str) -> None:
    asked.error = error
    done = asked("a.wav", "--url", "http://x")
    assert (done.exit_code, done.stderr) == (status, f"{line}\n")
    assert (asked.on_interrupt is signal.SIG_DFL) == (status == 130)
