"""Many requests at once, long ones, and clients that leave, on a real server."""

import asyncio
import contextlib
import difflib
import statistics
import time
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.audio import TranscriptionVerbose

from asr_server.audio.decoder import AudioLimits
from asr_server.audio.recording import Recording
from asr_server.checkpoint.sizes import read_window
from asr_server.config import EMBEDDED_MODEL
from asr_server.core import SAMPLE_RATE
from asr_server.machine import lower_priority
from benchmarks.client import connected
from benchmarks.client import transcribe as transcribe_stream
from benchmarks.health import probing_health
from benchmarks.reporting import quantile
from tests.conftest import Server, run_server
from tests.contract.official_client import FORMATS, plain, transcribe
from tests.support.embedded import embedded
from tests.support.memory_file import MemoryFile
from tests.support.speech import VOICES, Spoken, digits_of, errors_in, say
from tests.support.until import until
from tests.unit.api.sample_files import mp3, sound_file
from tests.unit.speakers.people import TALK, join

LIMITS = AudioLimits.from_settings(embedded(), read_window(EMBEDDED_MODEL))

SENDERS_NICENESS = 10
TALK_S = 200.0


@pytest.fixture(scope="module")
def talk_heard(server: Server) -> TranscriptionVerbose:
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", _strict_response_validation=True) as client:
        return client.audio.transcriptions.create(
            file=("talk.flac", sound_of(minutes_of_digits())),
            model="whisper-1",
            response_format="verbose_json",
            timeout=250,
        )


def spoken(number: int) -> Spoken:
    """Another sequence, of another length, in another voice, for each number."""
    rng = np.random.default_rng(number)
    digits = "".join(map(str, rng.integers(0, 10, 3 + number % 9)))
    return say(digits, VOICES[number % len(VOICES)])


def is_idle(load: dict[str, Any]) -> bool:
    """No request in flight, no chunk under way, no slot taken."""
    slots = sum(replica["slots_in_use"] for replica in load["replicas"])
    return not (load["server_load"] or load["chunks"] or slots)


def decoded(server: Server) -> tuple[int, int]:
    """(steps, tokens) of all replicas so far."""
    replicas = server.get("/load").json()["replicas"]
    return sum(r["num_decode_steps"] for r in replicas), sum(r["num_decoded_tokens"] for r in replicas)


async def decoded_up_to(server: Server, num_tokens: int) -> tuple[int, int]:
    """The same, once heartbeats have told of so many tokens."""
    await until(lambda: decoded(server)[1] >= num_tokens)
    return decoded(server)


async def test_32_requests_at_once_are_right_batched_and_leave_health_alone(
    client: AsyncOpenAI, server: Server
) -> None:
    async def one(number: int) -> tuple[str, str]:
        response_format = FORMATS[number % len(FORMATS)]
        said = spoken(number)
        answer = await transcribe(client, sound_file(said.samples), response_format=response_format)
        return plain(answer, response_format), said.text

    steps_before, tokens_before = decoded(server)
    asking = asyncio.gather(*(one(number) for number in range(32)))
    waits_s = []
    async with httpx.AsyncClient(base_url=server.url) as probe:
        while not asking.done():
            asked_at = time.monotonic()
            assert (await probe.get("/health")).status_code == 200
            waits_s.append(time.monotonic() - asked_at)
            await asyncio.sleep(0.01)
    pairs = await asking
    num_digits = sum(len(digits_of(said)) for _, said in pairs)
    steps, tokens = await decoded_up_to(server, tokens_before + num_digits)  # each is a token and more
    wrong = sum(errors_in(digits_of(heard), digits_of(said)) for heard, said in pairs)
    assert wrong <= 0.03 * num_digits
    assert (tokens - tokens_before) / (steps - steps_before) > 2
    assert statistics.median(waits_s) < 0.5


@pytest.mark.trial
@pytest.mark.parametrize("num_uploads", [48, 128])
async def test_long_uploads_at_once_leave_health_its_time(num_uploads: int) -> None:
    """For half a minute, in which all of them are read and heard side by side. Clients have machines of their
    own; on the server's, they let it go first.
    """
    samples = np.resize(spoken(8).samples, 300 * SAMPLE_RATE)
    files = [("long.wav", sound_file(samples)), ("long.mp3", mp3(samples))]
    with run_server("--log-level", "warning") as server, probing_health(server.url) as probe:
        async with connected(server.url) as client:
            lower_priority(SENDERS_NICENESS)  # of this process, which sends
            started_at = time.perf_counter()
            sending = [
                asyncio.create_task(transcribe_stream(client, *files[index % 2]))
                for index in range(num_uploads)
            ]
            await asyncio.wait(sending, timeout=30, return_when=asyncio.FIRST_EXCEPTION)
            waits_ms = [1000 * wait_s for wait_s in probe.latencies_since(started_at)]
            for each in sending:
                each.cancel()
            outcomes = await asyncio.gather(*sending, return_exceptions=True)
            with contextlib.suppress(PermissionError):  # only root may
                lower_priority(-SENDERS_NICENESS)
    failed = [each for each in outcomes if isinstance(each, Exception)]
    assert failed == []
    figures = [quantile(waits_ms, share) for share in (0.5, 0.99, 1.0)]
    print(f"/health beside {num_uploads} uploads, p50, p99, max in ms:", *(f"{each:.1f}" for each in figures))
    assert figures[1] < 10


@pytest.mark.trial
async def test_16_files_whose_speakers_are_told_apart_leave_health_its_time() -> None:
    talk, _ = join([said for _, said in TALK])
    file = sound_file(np.resize(talk, 120 * SAMPLE_RATE))
    with run_server("--log-level", "warning") as server, probing_health(server.url) as probe:
        async with httpx.AsyncClient(base_url=server.url, timeout=250) as client:
            started_at = time.perf_counter()
            fields = {"model": "whisper-1", "response_format": "diarized_json", "chunking_strategy": "auto"}
            asking = (
                client.post("/v1/audio/transcriptions", files={"file": file}, data=fields) for _ in range(16)
            )
            answers = await asyncio.gather(*asking)
            waits_ms = [1000 * wait_s for wait_s in probe.latencies_since(started_at)]
    speakers = [{segment["speaker"] for segment in answer.json()["segments"]} for answer in answers]
    assert speakers == [{"A", "B"}] * 16
    figures = [quantile(waits_ms, share) for share in (0.5, 0.99, 1.0)]
    print("/health beside 16 files, p50, p99, max in ms:", *(f"{each:.1f}" for each in figures))
    assert figures[1] < 15


async def test_other_requests_change_no_text(client: AsyncOpenAI) -> None:
    files = [sound_file(spoken(number).samples) for number in range(8)]
    alone = [(await transcribe(client, file)).text for file in files]
    together = await asyncio.gather(*(transcribe(client, file) for file in files))
    assert [answer.text for answer in together] == alone


async def test_a_client_that_leaves_frees_what_it_held(server: Server) -> None:
    long = sound_file(np.concatenate([spoken(number).samples for number in range(40)]))
    async with httpx.AsyncClient(base_url=server.url) as client:
        asking = asyncio.create_task(
            client.post("/v1/audio/transcriptions", files={"file": long}, data={"model": "whisper-1"})
        )
        while not (await client.get("/load")).json()["chunks"]:
            assert not asking.done()
        asking.cancel()
        while not is_idle((await client.get("/load")).json()):
            await asyncio.sleep(0.05)  # replicas report their slots once a second


def test_minutes_come_back_complete_and_in_order(talk_heard: TranscriptionVerbose) -> None:
    answer, truth = talk_heard, "".join(part.digits for part in minutes_of_digits())
    heard = digits_of(answer.text)
    assert errors_in(heard, truth) <= 0.08 * len(truth)  # the model's own errors; a lost chunk is more
    assert answer.segments
    starts = [segment.start for segment in answer.segments]
    assert starts == sorted(starts)
    assert answer.segments[-1].end <= answer.duration


@pytest.mark.trial
async def test_the_first_text_of_20_minutes_comes_within_1_5_s(server: Server) -> None:
    file = sound_of(minutes_of_digits(600.0) * 2)
    async with connected(server.url) as client:
        await transcribe_stream(client, "warm.wav", sound_file(spoken(0).samples))
        answers = [await transcribe_stream(client, "20-minutes.flac", file) for _ in range(3)]
    for answer in answers:
        print(f"first text after {answer.first_text_s:.2f} s, the whole after {answer.total_s:.1f} s")
    assert max(answer.first_text_s for answer in answers) < 1.5


def test_no_border_falls_into_a_digit() -> None:
    parts = minutes_of_digits()
    spoken, at_s = list[tuple[float, float]](), 0.0
    for part in parts:
        spoken += [(at_s + start_s, at_s + end_s) for start_s, end_s in part.times]
        at_s += len(part.samples) / SAMPLE_RATE
    borders_s = [border / SAMPLE_RATE for border in borders(sound_of(parts))]
    assert len(borders_s) >= TALK_S / LIMITS.chunk_s
    assert not [b for b in borders_s for start_s, end_s in spoken if start_s + 0.02 < b < end_s - 0.02]


async def test_digits_beside_a_border_are_heard_as_well_as_without_it(
    client: AsyncOpenAI, talk_heard: TranscriptionVerbose
) -> None:
    parts = minutes_of_digits()
    heard = heard_by_part(parts, digits_of(talk_heard.text))
    beside = parts_at_borders(parts, borders(sound_of(parts)))[:40]
    alone = await asyncio.gather(*(transcribe(client, sound_file(parts[i].samples)) for i in beside))
    wrong = sum(errors_in(heard[i], parts[i].digits) for i in beside)
    wrong_alone = sum(
        errors_in(digits_of(a.text), parts[i].digits) for a, i in zip(alone, beside, strict=True)
    )
    assert wrong <= wrong_alone + 0.05 * sum(len(parts[i].digits) for i in beside)


def sound_of(parts: list[Spoken]) -> bytes:
    return sound_file(np.concatenate([part.samples for part in parts]), "FLAC")


def minutes_of_digits(duration_s: float = TALK_S) -> list[Spoken]:
    """Sequences of 3 to 8 digits with pauses of 0.6 to 3 s between them."""
    rng = np.random.default_rng(10)
    parts: list[Spoken] = []
    while sum(len(part.samples) for part in parts) < duration_s * SAMPLE_RATE:
        digits = "".join(map(str, rng.integers(0, 10, int(rng.integers(3, 9)))))
        gaps = [0.25] * (len(digits) - 1) + [float(rng.uniform(0.6, 3.0))]
        parts.append(say(digits, str(rng.choice(VOICES)), gaps))
    return parts


def borders(file: bytes) -> list[int]:
    """The samples at which the front end of a server with default settings cuts."""
    recording, places, finished = Recording(MemoryFile(file), LIMITS), list[int](), False
    while not finished:
        chunks, finished = recording.next_slice()
        for chunk in chunks:
            places += [chunk.start_sample, chunk.start_sample + len(chunk.samples)]
    return places[1:-1]


def parts_at_borders(parts: list[Spoken], places: list[int]) -> list[int]:
    """Those on either side of each cut."""
    ends = np.cumsum([len(part.samples) for part in parts])
    first_behind = np.searchsorted(ends, places, side="right")
    beside = {int(index) for behind in first_behind for index in (behind - 1, behind, behind + 1)}
    return sorted(index for index in beside if 0 <= index < len(parts))


def heard_by_part(parts: list[Spoken], heard: str) -> list[str]:
    """What of the heard digits falls to each part, by the cheapest alignment."""
    truth = "".join(part.digits for part in parts)
    matcher = difflib.SequenceMatcher(None, truth, heard, autojunk=False)
    position = np.zeros(len(truth) + 1, int)  # of each said digit among the heard ones
    for _, start, end, heard_start, heard_end in matcher.get_opcodes():
        for index in range(start, end):
            position[index] = min(heard_start + index - start, heard_end)
    position[-1] = len(heard)
    ends = np.cumsum([0, *(len(part.digits) for part in parts)])
    return [heard[position[a] : position[b]] for a, b in pairwise(ends)]
