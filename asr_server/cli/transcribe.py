"""The command `asr-server transcribe`: flags into settings and a job for `asr_server.annexes.offline`."""

import io
import os
import re
import signal
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from asr_server.cli import options as shared
from asr_server.cli.checks import FOR_A_MODEL
from asr_server.config import DEFAULT_MODEL, EMBEDDED_MODEL_LIMIT, flag_name
from asr_server.core import SpeakerCount
from asr_server.formats.subtitles import SubtitleLayout
from asr_server.server.settings import SECTIONS, environment_names
from asr_server.telemetry import configure_logging, printable

INTERRUPTED: Final = 130
# The names of `formats.render.FORMATS`, which is loaded for work alone.
FORMATS: Final = ("text", "json", "verbose_json", "diarized_json", "srt", "vtt", "tsv")
FORMATS_AS_IN_WHISPER: Final = {"txt": ("text",), "all": ("text", "srt", "vtt", "tsv", "verbose_json")}
WITH_SPEAKERS: Final = "srt, vtt, verbose_json or diarized_json"
EMBEDDED_HINT: Final = f"transcribing with the embedded model whisper-digits, which {EMBEDDED_MODEL_LIMIT}"
SETTINGS: Final = frozenset(
    (
        *("model", "device", "dtype", "executor", "ray_address", "replicas", "tensor_parallel_size"),
        *("cpu_threads", "max_slots", "kernels", "beam_size"),
        *("check_voice", "preprocess_workers", "max_audio_s", "log_level", "log_format"),
    )
)
LOCAL_SETTINGS: Final = SETTINGS - {"model", "log_level", "log_format"}
NOT_REMOTE: Final = {"--manifest": "manifest", "--clip": "clips"}
_POSITIVE: Final = click.IntRange(min=1)


def _parse_formats(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    given = [name.strip() for value in values for name in value.split(",")]
    names = [name for entry in given for name in FORMATS_AS_IN_WHISPER.get(entry, (entry,))]
    for name in names:
        if name not in FORMATS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(FORMATS)}.", ctx, param)
    return tuple(dict.fromkeys(names))


@click.command(
    cls=shared.WhisperSpelledCommand,
    sections={"Server": ("url", "api_key", "background"), **SECTIONS},
    short_help="Transcribes recordings, without a server or on one elsewhere.",
)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "-f",
    "--format",
    "formats",
    multiple=True,
    default=("text",),
    callback=_parse_formats,
    metavar="FORMAT",
    help=f"{', '.join(FORMATS)}, all; several with commas or repeated  [default: text]",
)
@click.option(
    "-o",
    "--output-dir",
    "--output",
    "output_dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="where NAME.txt, .srt, .vtt, .json ... are written  [default: standard output]",
)
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILES.jsonl",
    help="instead of INPUT: JSON lines with audio, and id, language, prompt; what has a result is left out",
)
@click.option(
    "--clip",
    "clips",
    multiple=True,
    callback=shared.parse_clips,
    metavar="START-END",
    help="read this part alone, as 90-120 or 1:30-2:00; repeat for several; on this machine, not with --url",
)
@shared.language_option()
@shared.choice_option("--task", ("transcribe", "translate"), "translate: into English")
@click.option("--prompt", default="", help="names and words that occur, or text that went before")
@click.option(
    "--hotwords",
    default="",
    callback=lambda ctx, param, value: tuple(value.split(",")) if value else (),
    metavar="TERM,TERM",
    help="names and terms to listen for, separated by commas",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0.0, 1.0),
    default=0.0,
    help="of sampling; 0: the likeliest words, higher only where these make no sense  [default: 0]",
)
@click.option("--word-timestamps", is_flag=True, help="when each word is said, in verbose_json")
@shared.choice_option(
    "--subtitles",
    ("readable", "raw"),
    "cues of srt and vtt: two lines of 42 letters at most, or the model's segments",
)
@click.option("--max-line-width", type=_POSITIVE, help="of srt and vtt, in characters")
@click.option("--max-line-count", type=_POSITIVE, help="lines of a subtitle; with --max-line-width")
@click.option("--max-words-per-line", type=_POSITIVE, help="of srt and vtt")
@click.option("--highlight-words", is_flag=True, help="underline each word while it is said, in srt and vtt")
@click.option("--multilingual", is_flag=True, help="detect the language between pauses, not of the file")
@click.option(
    "--condition-on-previous-text",
    is_flag=True,
    help="the text so far as the prompt of each chunk, which takes one after another",
)
@shared.choice_option(
    "--channels", ("mix", "split"), "split: each channel of a stereo recording is a speaker"
)
@click.option(
    "--track",
    default="",
    metavar="N|LANGUAGE|N,N",
    help="audio track to read; with --channels split, two numbers are two speakers  [default: the file's]",
)
@click.option(
    "--speakers",
    metavar="auto|N|N-M|LEFT,RIGHT",
    help="tell voices apart: auto, so many, or so many to so many; with --channels split, two names  [A,B]",
)
@click.option("-r", "--recursive", is_flag=True, help="folders with all folders within them")
@click.option("--skip-existing", is_flag=True, help="skip inputs that already have results (resume)")
@click.option("--overwrite", is_flag=True, help="replace results that are there")
@click.option("-q", "--quiet", is_flag=True, help="say only what went wrong")
@click.option(
    "--url",
    metavar="URL",
    help="address of an asr-server that transcribes, such as http://gpu-host:8000  [default: this machine]",
)
@click.option(
    "--api-key", default="", envvar=environment_names("api_key"), show_envvar=True, help="key of that server"
)
@click.option(
    "--background",
    is_flag=True,
    help="with --url: as jobs of that server, which go on without this command; the same command goes on",
)
@shared.settings_options(SETTINGS)
def transcribe(
    inputs: tuple[str, ...], skip_existing: bool, overwrite: bool, prompt: str, **options: Any
) -> None:
    """Transcribes each INPUT: a recording of any format, a folder of them, or - for standard input.

    \b
    asr-server transcribe meeting.m4a
    asr-server transcribe recordings --recursive --format srt,json --output-dir subtitles

    \b
    ffmpeg -i talk.mkv -f wav - | asr-server transcribe - --model turbo
    asr-server transcribe recordings --url http://gpu-host:8000

    Exit status: 0, all transcribed; 1, some not, as said at the end; 2, wrongly called; 130 or
    143, ended by Ctrl-C or TERM.
    """
    options["layout"] = _layout(options)
    options["speakers"], options["voices"] = _speakers(options)
    job = {name: options.pop(name) for name in [*options] if name not in ("url", "api_key", *SETTINGS)}
    if skip_existing and overwrite:
        raise click.UsageError("--skip-existing and --overwrite exclude each other.")
    if job["output_dir"] is None and (skip_existing or overwrite or len(job["formats"]) > 1):
        raise click.UsageError("Several formats, --skip-existing and --overwrite need --output-dir.")
    _check_inputs(job, inputs)
    job["existing"] = "skip" if skip_existing else "overwrite" if overwrite else "refuse"
    job["prompt"] = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    job["arguments"] = inputs
    try:
        status = _run(options, job)
    except KeyboardInterrupt:  # while there was nothing yet to stop in order: a model being fetched, say
        click.echo("stopped: interrupted", err=True)
        status = INTERRUPTED
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends it at once, without a traceback
    sys.exit(status)


def _check_inputs(job: dict[str, Any], inputs: tuple[str, ...]) -> None:
    manifest = job["manifest"]
    if bool(inputs) == bool(manifest):
        raise click.UsageError("Give INPUT... or --manifest, one of the two.")
    if manifest is None:
        return
    if job["output_dir"] is None:
        raise click.UsageError("--manifest needs --output.")
    if not manifest.is_file():  # it is read from several places, and again when the job goes on
        raise click.UsageError(f"--manifest {manifest} is not a regular file.")


def _layout(options: dict[str, Any]) -> SubtitleLayout:
    options["raw"] = options.pop("subtitles") == "raw"
    layout = SubtitleLayout(**{field.name: options.pop(field.name) for field in fields(SubtitleLayout)})
    if layout.max_line_count and not layout.max_line_width:
        raise click.UsageError("--max-line-count needs --max-line-width.")
    return layout


def _speakers(options: dict[str, Any]) -> tuple[tuple[str, ...], SpeakerCount | None]:
    is_split, given, formats = options.pop("channels") == "split", options["speakers"], options["formats"]
    if "diarized_json" in formats and options["task"] == "translate":
        raise click.UsageError("--format diarized_json does not go with a translation.")
    if not is_split:
        if given and set(formats) <= {"text", "json", "tsv"}:
            raise click.UsageError(f"--speakers needs a format that shows them: --format {WITH_SPEAKERS}.")
        wanted = given or ("auto" if "diarized_json" in formats else None)
        return (), _count(wanted) if wanted else None
    names = tuple(name.strip() for name in (given or "A,B").split(","))
    if len(set(filter(str.isprintable, filter(None, names)))) != 2 or len(names) != 2:
        raise click.UsageError("--speakers are two different names: of the left and of the right channel.")
    return names, None


def _count(wanted: str) -> SpeakerCount:
    match = re.fullmatch(r"(\d{1,2})(?:-(\d{1,2}))?", wanted)
    if wanted == "auto":
        return SpeakerCount()
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]) <= 32:
        raise click.UsageError(
            "--speakers is auto, a number or two such as 2-4; names need --channels split."
        )
    return SpeakerCount(int(match[1]), int(match[2] or match[1]))


def _run(options: dict[str, Any], job: dict[str, Any]) -> int:
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    if job["quiet"]:
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from asr_server.annexes.offline.outputs import OutputError
    from asr_server.errors import CheckpointError, InvalidValue

    url, api_key = options.pop("url"), options.pop("api_key")
    if job["background"] and not url:
        raise click.UsageError("--background needs --url: jobs are a server's.")
    try:
        return _transcribe_on(url, api_key, options, job) if url else _transcribe_here(options, job)
    except (CheckpointError, InvalidValue, OutputError) as error:
        shared.print_error(error)
        return shared.WRONG_USAGE


def _transcribe_here(options: dict[str, Any], job: dict[str, Any]) -> int:
    shared.log_errors_alone(options)
    settings = shared.settings_from(options, FOR_A_MODEL)
    if settings.why_embedded:
        click.echo(
            f"Warning: {EMBEDDED_HINT}, because {DEFAULT_MODEL} could not be had: "
            f"{printable(settings.why_embedded)}",
            err=True,
        )
    elif settings.serves_embedded_model and not job["quiet"]:
        click.echo(EMBEDDED_HINT, err=True)
    from asr_server.annexes.offline.local import LocalTranscriber, TranscribeJob
    from asr_server.annexes.offline.run import transcribe_files, transcribe_manifest

    if job["manifest"]:
        return transcribe_manifest(settings, TranscribeJob(**job))
    return transcribe_files(partial(LocalTranscriber, settings), TranscribeJob(**job))


def _transcribe_on(url: str, api_key: str, options: dict[str, Any], job: dict[str, Any]) -> int:
    # Variables may be meant for a local server.
    given = [name for name in sorted(LOCAL_SETTINGS) if shared.is_flag_given(name)]
    flags = [*map(flag_name, given), *(flag for flag, name in NOT_REMOTE.items() if job[name])]
    for flag in flags:
        raise click.UsageError(f"{flag} is for this machine: it does not go with --url.")
    configure_logging("error", options["log_format"])
    from asr_server.annexes.offline.local import TranscribeJob
    from asr_server.annexes.offline.remote import RemoteServer, RemoteTranscriber
    from asr_server.annexes.offline.run import transcribe_files

    server = RemoteServer(url, api_key, options["model"] if shared.is_flag_given("model") else "")
    return transcribe_files(partial(RemoteTranscriber, server), TranscribeJob(**job))
