"""The course of many files, with a transcriber that does as it is told; its numbers and its exit status."""

import asyncio
import contextlib
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec
import pytest

from asr_server.annexes.offline.inputs import Failure, Input
from asr_server.annexes.offline.local import OnProgress, TranscribeJob
from asr_server.annexes.offline.outputs import FolderOutputs, OutputError, Outputs, StandardOutput
from asr_server.annexes.offline.progress import SOME_FAILED, ProgressBars, Summary
from asr_server.annexes.offline.run import Batch, run_to_the_end, transcribe_files
from asr_server.audio.recording import Source
from asr_server.core import Track, Transcript
from asr_server.errors import ChunkFailed, EngineUnavailable, InvalidAudio, InvalidValue
from asr_server.formats.render import ResponseFormat
from tests.unit.formats.samples import transcript

Answer = Transcript | Exception


class Scripted:
    """Gives each file its answer; files of a later index are done sooner."""

    running = contextlib.nullcontext
    model = "base"

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        assert isinstance(source, Path)
        on_progress(1.0, None)
        for _ in range(len(self.answers) - list(self.answers).index(source.name)):
            await asyncio.sleep(0)
        on_progress(2.0, 3.0)
        answer = self.answers[source.name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def inputs_named(names: list[str]) -> list[Input]:
    return [Input(name, Path(name), PurePath(name)) for name in names]


async def run(
    scripted: Scripted, make_outputs: Callable[[list[Input]], Outputs], quiet: bool = True
) -> Summary:
    inputs = inputs_named(list(scripted.answers))
    summary = Summary(len(inputs))
    batch = Batch(inputs, scripted, make_outputs(inputs), summary, ProgressBars(len(inputs), quiet))
    await batch.run(range(len(inputs)))
    return summary


def printing(*names: str, response_format: ResponseFormat = "text") -> Callable[[list[Input]], Outputs]:
    return lambda inputs: StandardOutput(inputs, TranscribeJob(names, (response_format,)))


def texts(num_files: int) -> dict[str, Answer]:
    return {f"{i}.wav": transcript(text=f"text {i}") for i in range(num_files)}


async def test_standard_output_is_in_the_order_given_with_a_header_for_each(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    summary = await run(Scripted(texts(40)), printing("0.wav", "1.wav"))
    expected = "".join(f"==> {i}.wav <==\ntext {i}\n\n" for i in range(40))
    assert capsysbinary.readouterr().out.decode() == expected
    assert summary.num_transcribed == 40


async def test_a_recording_in_which_nothing_is_heard_is_named_with_the_model_that_heard_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    silent = transcript(text="", duration_s=12.34)
    summary = await run(Scripted({"a.wav": silent, "b.wav": transcript(text="b")}), printing("a", "b"))
    summary.show(quiet=True)
    assert capsys.readouterr().err == "warning: a.wav: no speech recognised in 12.3 s (model base)\n"
    assert summary.exit_status == 0


async def test_what_fails_is_left_out_and_others_go_on(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    failing: dict[str, Answer] = {
        "0.wav": InvalidAudio("not audio"),
        "2.wav": ChunkFailed("too much for it"),
        "3.wav": FileNotFoundError(2, "No such file or directory"),
        "4.wav": ZeroDivisionError("a mistake of ours"),
    }
    summary = await run(Scripted(texts(6) | failing), printing("many", "files"))
    assert capsysbinary.readouterr().out.decode() == "==> 1.wav <==\ntext 1\n\n==> 5.wav <==\ntext 5\n\n"
    assert {(f.name, f.reason) for f in summary.failures} == {
        ("0.wav", "not audio"),
        ("2.wav", "too much for it"),
        ("3.wav", "No such file or directory"),
        ("4.wav", "ZeroDivisionError: a mistake of ours"),
    }
    assert (summary.num_transcribed, summary.exit_status) == (2, 1)


async def test_without_an_engine_nothing_further_is_tried() -> None:
    answers: dict[str, Answer] = {"a.wav": EngineUnavailable("No engine is running."), **texts(2)}
    with pytest.raises(EngineUnavailable):
        await run(Scripted(answers), printing("many", "files"))


async def test_in_a_folder_a_result_is_there_as_soon_as_it_is_done(tmp_path: Path) -> None:
    """A long first file must not keep the others' results in memory, where an interruption loses them."""
    answers = texts(2)
    job = TranscribeJob(tuple(answers), output_dir=tmp_path)
    done = asyncio.Event()

    class FirstWaits(Scripted):
        async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
            if source == Path("0.wav"):
                await done.wait()
            return await super().transcribe(source, on_progress)

    running = asyncio.create_task(
        run(FirstWaits(answers), lambda inputs: FolderOutputs(tmp_path, inputs, job))
    )
    async with asyncio.timeout(60):
        while not (tmp_path / "1.txt").exists():
            await asyncio.sleep(0.01)
        assert not (tmp_path / "0.txt").exists()
        done.set()
        assert (await running).num_transcribed == 2


SPEED = r"(\d+\.\d) s of audio in \d+\.\d s \(\d+\.\d x\)"


async def test_each_recording_has_a_line_with_its_speed_and_the_summary_has_the_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, Answer] = {f"{i}.wav": transcript(text="text", duration_s=i + 1.0) for i in range(3)}
    job = TranscribeJob(tuple(answers), output_dir=tmp_path)
    summary = await run(Scripted(answers), lambda inputs: FolderOutputs(tmp_path, inputs, job), quiet=False)
    summary.show(quiet=False)
    *files, last = capsys.readouterr().err.splitlines()
    for number, line in enumerate(sorted(files)):
        written = re.escape(f"{tmp_path}/{number}.txt")
        assert re.findall(rf"^{number}\.wav: {SPEED} -> {written}$", line) == [f"{number + 1}.0"]
    assert re.findall(f"^3 transcribed; {SPEED}$", last) == ["6.0"]


def test_what_is_said_of_a_recording_is_a_line_whatever_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressBars(1, quiet=False).say("a\nb.wav: 3.4 s -> out/a\nb.srt")
    summary = Summary(num_inputs=1)
    summary.failures.append(Failure("c\nd.wav", "out/c\nd.srt exists"))
    summary.show(quiet=True)
    assert capsys.readouterr().err.splitlines() == [
        r"a\nb.wav: 3.4 s -> out/a\nb.srt",
        r"failed: c\nd.wav: out/c\nd.srt exists",
    ]


@dataclass
class _Rotated:
    """A server whose key changes after the first recording."""

    job: TranscribeJob
    model = "base"
    num_done = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        self.num_done += 1
        if self.num_done > 1:
            raise InvalidValue("Incorrect API key.")
        return transcript(text="one")


def test_a_changed_key_ends_a_run_with_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(b"?")
    paths = tuple(str(tmp_path / name) for name in ("a.wav", "b.wav"))
    job = TranscribeJob(paths, ("text",), tmp_path / "out")
    assert transcribe_files(_Rotated, job) == SOME_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert "stopped: Incorrect API key." in lines
    assert lines[-1].startswith("1 transcribed, 1 not begun or not finished; ")


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        (None, "", 0),
        (KeyboardInterrupt(), "interrupted", 130),
        (asyncio.CancelledError(), "terminated", 143),
        (EngineUnavailable("no engine"), "no engine", 1),
        (OutputError("no room"), "no room", 1),
        (OSError(28, "No space left on device"), "No space left on device", 1),
    ],
)
def test_a_run_ends_with_a_reason_and_status(error: BaseException | None, reason: str, status: int) -> None:
    def run() -> None:
        if error:
            raise error

    assert run_to_the_end(run) == (reason, status)


async def test_tracks_that_were_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    tracks = (Track(2, "ger"), Track(3))
    answer = msgspec.structs.replace(transcript(text="a"), tracks=tracks)
    await run(Scripted({"a.wav": answer}), printing("a.wav"), quiet=False)
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "a.wav: several audio tracks; read number 2 (ger) and number 3"


class Reader:
    """Returns what a file holds; "stop" waits for another one and ends the run by a signal."""

    running = contextlib.nullcontext
    model = "base"

    def __init__(self, job: TranscribeJob) -> None:
        self._other_is_read = asyncio.Event()

    async def transcribe(self, source: Source, on_progress: OnProgress) -> Transcript:
        assert isinstance(source, Path)
        if source.stem == "stop":
            await self._other_is_read.wait()
            for _ in range(20):  # until the other's result is held back
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        self._other_is_read.set()
        return transcript(text=source.stem, duration_s=6.0)


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_what_was_read_before_a_signal_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.wav" for name in ("stop", "b")]
    for path in paths:
        path.touch()
    assert transcribe_files(Reader, TranscribeJob(tuple(map(str, paths)))) == 143
    printed = capsys.readouterr()
    assert printed.out == f"==> {paths[1]} <==\nb\n\n"
    assert "stopped: terminated" in printed.err.splitlines()


def test_a_stream_that_cannot_be_read_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Broken())))
    assert transcribe_files(Reader, TranscribeJob(("-",))) == 1
    assert capsys.readouterr().err.splitlines()[0] == "failed: standard input: Input/output error"


FAILED = [Failure("b.wav", "damaged")]


@pytest.mark.parametrize(
    ("summary", "quiet", "lines"),
    [
        (Summary(1, 1, audio_s=1.0, elapsed_s=1.0), False, []),
        (Summary(2, 2, 0, 2.0, 1.0), False, ["2 transcribed; 2.0 s of audio in 1.0 s (2.0 x)"]),
        (Summary(1, num_skipped=1), False, ["1 skipped"]),
        (Summary(2, 1, failures=FAILED), True, ["failed: b.wav: damaged"]),
        (Summary(1, failures=FAILED), False, ["failed: b.wav: damaged", "1 failed"]),
        (Summary(stop_reason="interrupted"), True, ["stopped: interrupted"]),
        (
            Summary(1, 1, cut_short=["a"], unheard=["a: no speech"]),
            True,
            ["warning: a: damaged or cut short; what could be read is transcribed", "warning: a: no speech"],
        ),
    ],
)
def test_warnings_and_failures_are_always_shown_and_numbers_where_they_say_more(
    summary: Summary, quiet: bool, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary.show(quiet)
    assert capsys.readouterr().err.splitlines() == lines


CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@pytest.fixture(params=[True])
def is_terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rich takes standard error for a terminal, of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1" if request.param else "")
    return bool(request.param)


def plain(text: str) -> str:
    return CONTROL.sub("", text)


@pytest.mark.usefixtures("is_terminal")
def test_each_recording_has_a_bar_and_all_of_several_have_one(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(2, quiet=False)
    with bars.progress:
        first = bars.begin("[red]a.wav\x07")
        bars.move(first, 100.4, 200.0)
        bars.finish(first)
        second = bars.begin("b.wav")
        bars.move(second, 10.0, None)
        bars.move(second, 20.0, 0.0)
        bars.move(second, 0.2, 0.8)
    shown = plain(capsys.readouterr().err)
    assert re.search(r"all +[━╸╺]+ +\d", shown)
    assert re.search(r"\[red\]a\.wav\\x07 +[━╸╺]+ +0:01:40 of 0:03:20 +\d", shown)
    assert re.search(r"all +[━╸╺]+ +1 of 2 files +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:10 +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:20 +\d", shown)
    assert re.search(r"b\.wav +[━╸╺]+ +0:00:00 of 0:00:01 +\d", shown)
    after_the_first = shown[shown.index("1 of 2 files") :]
    assert "a.wav" not in after_the_first


@pytest.mark.usefixtures("is_terminal")
def test_a_line_beside_the_bars_is_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    long = "[bold]12[/bold] 'x' " + "word " * 100
    ProgressBars(1, quiet=False).say(f"{long}\x1b[2J")
    assert capsys.readouterr().err == f"{long}\\x1b[2J\n"
    ProgressBars(1, quiet=True).say(long)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, True), (False, False)], indirect=["is_terminal"])
@pytest.mark.usefixtures("is_terminal")
def test_there_is_no_bar_where_nobody_sees_it(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars(2, quiet)
    with bars.progress:
        bar = bars.begin("a.wav")
        bars.move(bar, 1.0, 2.0)
        bars.finish(bar)
    assert capsys.readouterr().err == ""
