"""A reading of known sentences against its own text and ten kinds of wrong text, with whisper-base."""

from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from asr_server.annexes.alignment.align import Alignment, align
from asr_server.audio.recording import Recording
from asr_server.core import Clip, DecodingOptions, Transcript
from harness.speech.synthesis import Speech, is_installed, read_for
from tests.support.memory_file import MemoryFile
from tests.support.real_weights import real_checkpoint
from tests.unit.transcription.pipeline import Pipeline, running_pipeline, wav

pytestmark = [
    pytest.mark.trial,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not is_installed(), reason="needs Piper"),
]
PREFACE = "This recording was made in the summer of last year by volunteers, and everybody may use it."
GERMAN = "Morgen wird es in den Bergen regnen, und wir bleiben zu Hause. "
OTHER = (
    "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little. "
)
FIGURES = {"six": "6", "fifty": "50", "ten": "10", "sixty": "60"}
OFF_S = 0.3


class Reading:
    def __init__(self, speech: Speech, pipeline: Pipeline, transcript: Transcript) -> None:
        self.speech, self._pipeline, self._transcript = speech, pipeline, transcript
        self.sentences = [sentence.text for sentence in speech.sentences]
        self._file = wav(speech.samples)

    async def align(self, text: str) -> Alignment:
        def open_recording(clips: Sequence[Clip]) -> Recording:
            return Recording(MemoryFile(self._file), self._pipeline.limits, clips=clips)

        return await align(text, self._transcript, self._pipeline.transcriber, open_recording)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reading() -> AsyncIterator[Reading]:
    speech = read_for(200.0, (0.3, 1.0, 0.5, 3.0, 0.8))
    options = DecodingOptions(language="en", word_timestamps=True)
    async with running_pipeline(real_checkpoint("base"), check_voice=True, short_audio="tail") as pipeline:
        yield Reading(speech, pipeline, await pipeline.transcribe(speech.samples, options))


def spoken_share(alignment: Alignment) -> float:
    return sum(word.is_spoken for word in alignment.words) / len(alignment.words)


def check_times(reading: Reading, alignment: Alignment, sentences: Sequence[int]) -> None:
    """The text consists of these sentences: each word that is said lies in its own."""
    words = iter(alignment.words)
    for number in sentences:
        said = reading.speech.sentences[number]
        for _ in said.text.split():
            word = next(words)
            if word.is_spoken:
                assert said.start_s - OFF_S <= word.start_s <= word.end_s <= said.end_s + OFF_S, word
    assert not list(words)


@pytest.mark.parametrize(
    "write",
    [str, str.upper, lambda text: "".join(c for c in text if c.isalpha() or c == " ").lower()],
    ids=["own", "uppercase", "no punctuation"],
)
async def test_another_spelling_is_aligned_as_its_own(reading: Reading, write: Callable[[str], str]) -> None:
    alignment = await reading.align(write(reading.speech.text))
    assert spoken_share(alignment) >= 0.98
    check_times(reading, alignment, range(len(reading.sentences)))


async def test_figures_are_found_where_they_are_said(reading: Reading) -> None:
    text = " ".join(FIGURES.get(word, word) for word in reading.speech.text.split())
    alignment = await reading.align(text)
    assert spoken_share(alignment) >= 0.98
    check_times(reading, alignment, range(len(reading.sentences)))


@pytest.mark.parametrize("missing", [range(5), range(10, 18), range(25, 36)])
async def test_a_missing_chapter_is_listed_as_speech_without_text(reading: Reading, missing: range) -> None:
    kept = [number for number in range(len(reading.sentences)) if number not in missing]
    alignment = await reading.align(" ".join(reading.sentences[number] for number in kept))
    assert spoken_share(alignment) >= 0.98
    check_times(reading, alignment, kept)
    longest = max(alignment.not_in_text, key=lambda each: each.end_s - each.start_s)
    of_text = sum(len(reading.sentences[number].split()) for number in missing)
    assert len(longest.text.split()) >= 0.9 * of_text


@pytest.mark.parametrize("preface", [PREFACE, 8 * GERMAN], ids=["preface", "other language"])
async def test_what_is_added_is_marked_and_moves_nothing(reading: Reading, preface: str) -> None:
    own = await reading.align(reading.speech.text)
    alignment = await reading.align(f"{preface} {reading.speech.text}")
    added = len(preface.split())
    assert not any(word.is_spoken for word in alignment.words[:added])
    for word, expected in zip(alignment.words[added:], own.words, strict=True):
        assert word._replace(loss=None) == expected._replace(loss=None)
        assert word.loss == pytest.approx(expected.loss, abs=1e-3), "others were read beside it"


async def test_sentences_in_pauses_are_marked(reading: Reading) -> None:
    """Each has the time that it would take, and no sound."""
    texts = [f"{text} {'And so it was.' * (n % 5 == 3)}" for n, text in enumerate(reading.sentences)]
    alignment = await reading.align(" ".join(texts))
    added = sum(len(text.split()) for text in texts) - len(reading.speech.text.split())
    assert sum(not word.is_spoken for word in alignment.words) >= added
    assert spoken_share(alignment) >= 0.98 - added / len(alignment.words)


async def test_a_repeated_paragraph_is_said_once(reading: Reading) -> None:
    order = [*range(12), *range(6, 12), *range(12, len(reading.sentences))]
    alignment = await reading.align(" ".join(reading.sentences[number] for number in order))
    again = sum(len(reading.sentences[number].split()) for number in range(6, 12))
    assert abs(sum(not word.is_spoken for word in alignment.words) - again) <= 0.02 * len(alignment.words)
    check_times(reading, alignment, order)


async def test_of_swapped_chapters_one_is_marked_and_listed(reading: Reading) -> None:
    order = [*range(20, len(reading.sentences)), *range(20)]
    alignment = await reading.align(" ".join(reading.sentences[number] for number in order))
    check_times(reading, alignment, order)
    assert 0.4 <= spoken_share(alignment) <= 0.8
    assert max(len(each.text.split()) for each in alignment.not_in_text) > 100


@pytest.mark.parametrize("text", [20 * GERMAN, 20 * OTHER, OTHER], ids=["other language", "wrong", "short"])
async def test_another_text_is_not_forced(reading: Reading, text: str) -> None:
    alignment = await reading.align(text)
    assert spoken_share(alignment) <= 0.02
    assert sum(len(each.text.split()) for each in alignment.not_in_text) >= 500


async def test_single_wrong_words_are_marked(reading: Reading) -> None:
    words = reading.speech.text.split()
    text = " ".join("zebra" if number % 20 == 10 else word for number, word in enumerate(words))
    alignment = await reading.align(text)
    wrong = [word.is_spoken for word in alignment.words if word.text == "zebra"]
    assert sum(wrong) <= 0.1 * len(wrong)
    assert spoken_share(alignment) >= 0.92
