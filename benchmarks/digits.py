"""Error rates of a whisper-digits checkpoint, through HTTP and the official openai client in strict mode.

    python -m benchmarks.digits                                        the embedded model
    python -m benchmarks.digits --model DIR --speaker jackson          a checkpoint that never heard jackson
    python -m benchmarks.digits --levels                               faint and uneven speech, with auto too

Sequences of 3 to 12 digits are put together from single recordings with random pauses: of one speaker of the
spoken-digits recordings, and of synthesised voices that never train the model (tests/data). Digit error rate:
substitutions, insertions and deletions over the digits said. Clean, in telephone bandwidth, and in noise of
20 dB. What holds no digit must come back empty. With --levels: at several levels, with
`chunking_strategy=auto`, which evens loudness and looks for voices, and without.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
from openai import AsyncOpenAI, omit
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.signal import butter, sosfilt

from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE, Samples
from benchmarks.reporting import benchmark_parser, command, machine, pyplot, write_json
from benchmarks.running_server import running_server
from benchmarks.uploads import wav
from tests.noises import make_noise
from tests.speech import RECORDINGS, VOICES, Spoken, digit, digits_of, errors_in

SPOKEN_DIGITS = Path(__file__).parents[1] / "../shared/data/spoken-digits/spoken-digits.tar.xz"
CONCURRENCY = 16
SEGMENT_PAUSE_S = 0.6

Takes = dict[str, list[Samples]]  # digit: recordings of it, each [num_samples]
Random = np.random.Generator
Change = Callable[[Samples, Random], Samples]


# -- What is said --------------------------------------------------------------------------------------------


def recorded_takes(speaker: str) -> Takes:
    """One speaker's recordings at 16 kHz, by digit."""
    takes: Takes = {str(value): [] for value in range(10)}
    with tarfile.open(SPOKEN_DIGITS) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            name = Path(member.name).name.split("_")
            if member.isfile() and len(name) == 3 and name[1] == speaker:
                samples, rate_hz = soundfile.read(archive.extractfile(member), dtype="float32")
                takes[name[0]].append(soxr.resample(samples, rate_hz, SAMPLE_RATE))
    if not takes["0"]:
        raise SystemExit(f"{SPOKEN_DIGITS} holds no speaker {speaker!r}")
    return takes


def synthesised_takes(voice: str) -> Takes:
    return {str(value): [digit(str(value), voice)] for value in range(10)}


def sequence(takes: Takes, rng: Random) -> Spoken:
    """3 to 12 random digits with pauses of 0.05 to 1 s, and where each lies."""
    digits = "".join(rng.choice(list("0123456789"), rng.integers(3, 13)))
    parts, times, at_s = [_silence(rng.uniform(0.1, 0.5))], [], 0.0
    at_s = len(parts[0]) / SAMPLE_RATE
    for value in digits:
        take = takes[value][rng.integers(len(takes[value]))]
        times.append((at_s, at_s + len(take) / SAMPLE_RATE))
        parts += [take, _silence(rng.uniform(0.05, 0.5) if rng.random() < 0.8 else rng.uniform(0.7, 1.0))]
        at_s += (len(take) + len(parts[-1])) / SAMPLE_RATE
    return Spoken(np.concatenate(parts), digits, times)


def _silence(duration_s: float) -> Samples:
    return np.zeros(int(duration_s * SAMPLE_RATE), np.float32)


# -- What happens to it on the way ---------------------------------------------------------------------------


def clean(samples: Samples, rng: Random) -> Samples:
    return samples


def telephone(samples: Samples, rng: Random) -> Samples:
    """300 to 3400 Hz."""
    band = butter(4, (300, 3400), "bandpass", fs=SAMPLE_RATE, output="sos")
    filtered: npt.NDArray[np.float64] = sosfilt(band, samples)
    return filtered.astype(np.float32)


def noise_20_db(samples: Samples, rng: Random) -> Samples:
    """White noise 20 dB below the speech."""
    spoken = samples[np.abs(samples) > 1e-4]
    level = float(np.sqrt(np.mean(spoken**2))) / 10
    return samples + rng.normal(0, level, len(samples)).astype(np.float32)


CONDITIONS: dict[str, Change] = {
    "clean": clean,
    "telephone": telephone,
    "noise 20 dB": noise_20_db,
}


def peaks_at(level_db: float, noise_db: float | None = None) -> Change:
    """Peaks of so many dBFS, over pink noise of such a level."""

    def change(samples: Samples, rng: Random) -> Samples:
        return _in_noise(samples * _gain(level_db) / np.abs(samples).max(), noise_db)

    return change


def uneven(noise_db: float | None = None) -> Change:
    """The second half 20 dB louder than the first, with peaks of -6 dBFS."""

    def change(samples: Samples, rng: Random) -> Samples:
        gains = np.where(np.arange(len(samples)) < len(samples) // 2, _gain(-20), 1).astype(np.float32)
        return _in_noise(samples * gains * _gain(-6) / np.abs(samples).max(), noise_db)

    return change


def _in_noise(samples: Samples, noise_db: float | None) -> Samples:
    return samples if noise_db is None else samples + make_noise("pink", noise_db, len(samples) / SAMPLE_RATE)


def _gain(level_db: float) -> float:
    return float(10 ** (level_db / 20))


LEVELS: dict[str, Change] = {
    "as recorded": clean,
    "peaks at -40 dBFS": peaks_at(-40),
    "peaks at -50 dBFS": peaks_at(-50),
    "peaks at -40 dBFS, pink noise at -65": peaks_at(-40, -65),
    "one half 20 dB louder": uneven(),
    "one half 20 dB louder, pink noise at -55": uneven(-55),
}


def nothing_said(rng: Random) -> dict[str, bytes]:
    """Files without a digit in them."""

    def tone(pitch_hz: float, loudness: float) -> Samples:
        times_s = np.arange(6 * SAMPLE_RATE) / SAMPLE_RATE
        return (loudness * np.sin(2 * np.pi * pitch_hz * times_s)).astype(np.float32)

    files = {
        "silence": wav(np.zeros(6 * SAMPLE_RATE, np.float32)),
        "white noise": wav(rng.normal(0, 0.05, 6 * SAMPLE_RATE).astype(np.float32)),
        "tone 440 Hz": wav(tone(440, 0.3)),
        "two tones": wav(tone(697, 0.2) + tone(1209, 0.2)),
    }
    for name in ("jfk.wav", "jfk.mp3", "cough.wav", "silence-1s.wav", "two-speakers-stereo.wav"):
        if (RECORDINGS / name).exists():
            files[name] = (RECORDINGS / name).read_bytes()
    return files


# -- What is heard -------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Errors over digits; time errors in seconds."""

    num_digits: int = 0
    num_errors: int = 0
    num_sequences: int = 0
    num_wrong: int = 0
    num_boundaries: int = 0
    num_boundaries_off: int = 0  # by more than 0.2 s
    worst_s: float = 0.0

    def add(self, spoken: Spoken, heard: str, segments: Sequence[tuple[float, float]]) -> None:
        errors = errors_in(digits_of(heard), spoken.digits)
        self.num_digits += len(spoken.digits)
        self.num_errors += errors
        self.num_sequences += 1
        self.num_wrong += errors > 0
        expected = runs(spoken.times)
        if errors == 0 and len(expected) == len(segments):
            offs = [
                abs(a - b) for e, s in zip(expected, segments, strict=True) for a, b in zip(e, s, strict=True)
            ]
            self.num_boundaries += len(offs)
            self.num_boundaries_off += sum(off > 0.2 for off in offs)
            self.worst_s = max(self.worst_s, *offs)

    @property
    def error_rate(self) -> float:
        return self.num_errors / max(1, self.num_digits)


def runs(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Start and end of each run of digits between pauses of 0.6 s and more."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in times:
        if joined and start_s - joined[-1][1] < SEGMENT_PAUSE_S:
            joined[-1] = (joined[-1][0], end_s)
        else:
            joined.append((start_s, end_s))
    return joined


class Listener:
    """The server under test, by the official client."""

    def __init__(self, url: str, progress: Progress) -> None:
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)
        self._places = asyncio.Semaphore(CONCURRENCY)
        self._progress = progress

    async def hear(self, wav: bytes) -> tuple[str, list[tuple[float, float]]]:
        async with self._places:
            answer = await self._client.audio.transcriptions.create(
                file=wav, model="whisper-1", response_format="verbose_json"
            )
        return answer.text, [(segment.start, segment.end) for segment in answer.segments or []]

    async def hear_text(self, wav: bytes, auto: bool = False) -> str:
        async with self._places:
            answer = await self._client.audio.transcriptions.create(
                file=wav, model="whisper-1", chunking_strategy="auto" if auto else omit
            )
        return answer.text

    async def tally(
        self, title: str, spoken: list[Spoken], sounds: list[Samples], times: bool = False, auto: bool = False
    ) -> Tally:
        bar, tally = self._progress.add_task(title, total=len(spoken)), Tally()

        async def one(said: Spoken, samples: Samples) -> None:
            file = wav(samples)
            heard, segments = await self.hear(file) if times else (await self.hear_text(file, auto), [])
            tally.add(said, heard, segments)
            self._progress.advance(bar)

        await asyncio.gather(*(one(said, samples) for said, samples in zip(spoken, sounds, strict=True)))
        return tally


async def measure(
    url: str, speakers: dict[str, list[Takes]], num_sequences: int, levels: bool
) -> dict[str, Tally]:
    """The same sequences in every condition; at several levels with `auto` too."""
    results: dict[str, Tally] = {}
    with Progress(console=Console(stderr=True)) as progress:
        listener = Listener(url, progress)
        for speaker, voices in speakers.items():
            for condition, change in (LEVELS if levels else CONDITIONS).items():
                rng = np.random.default_rng(7)
                spoken = [sequence(voices[i % len(voices)], rng) for i in range(num_sequences)]
                sounds = [change(said.samples, rng) for said in spoken]
                title = f"{speaker}, {condition}"
                results[title] = await listener.tally(title, spoken, sounds)
                if levels:
                    title += ", auto"
                    results[title] = await listener.tally(title, spoken, sounds, auto=True)
                elif condition == "clean":
                    title += ", timestamps"
                    results[title] = await listener.tally(title, spoken, sounds, times=True)
    return results


async def measure_rejection(url: str) -> dict[str, str]:
    with Progress(console=Console(stderr=True)) as progress:
        listener = Listener(url, progress)
        files = nothing_said(np.random.default_rng(7))
        return {name: await listener.hear_text(data) for name, data in files.items()}


def show(results: dict[str, Tally], rejection: dict[str, str]) -> None:
    table = Table("sequences of", "digits", "DER", "sequences wrong", "boundaries off by > 0.2 s", "worst")
    for title, tally in results.items():
        table.add_row(
            title,
            str(tally.num_digits),
            f"{tally.error_rate:.1%}",
            f"{tally.num_wrong} of {tally.num_sequences}",
            f"{tally.num_boundaries_off} of {tally.num_boundaries}" if tally.num_boundaries else "",
            f"{tally.worst_s:.2f} s" if tally.num_boundaries else "",
        )
    console = Console()
    console.print(table)
    for name, text in rejection.items():
        console.print(f"{name}: {'empty' if not text else repr(text)}")


def main() -> None:
    parser = benchmark_parser(__doc__, plots=True)
    parser.add_argument("--model", default=str(EMBEDDED_MODEL))
    parser.add_argument("--speaker", action="append", default=[], help="of the recordings; may be repeated")
    parser.add_argument("--sequences", type=int, default=200, help="for each line of the table")
    parser.add_argument("--levels", action="store_true", help="faint and uneven speech instead")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quick", action="store_true", help="20 sequences")
    options = parser.parse_args()
    Console().print(command(), machine())
    speakers = {"synthesised voices left out": [synthesised_takes(voice) for voice in VOICES]}
    speakers |= {speaker: [recorded_takes(speaker)] for speaker in options.speaker}
    with running_server(options.model, "--dtype", options.dtype) as url:
        num_sequences = 20 if options.quick else options.sequences
        results = asyncio.run(measure(url, speakers, num_sequences, options.levels))
        rejection = asyncio.run(measure_rejection(url))
    show(results, rejection)
    figures = {title: {**vars(tally), "error_rate": tally.error_rate} for title, tally in results.items()}
    write_json(options.json, {"sequences": figures, "rejection": rejection})
    if options.plot:
        plot(results, options.plot)


def plot(results: dict[str, Tally], path: Path) -> None:
    """The error rate of each line of the table."""
    figure, axes = pyplot().subplots(figsize=(7, 1 + 0.4 * len(results)), layout="constrained")
    axes.barh(list(results), [100 * tally.error_rate for tally in results.values()])
    axes.set_xlabel("digits wrong, missing or too many (%)")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
