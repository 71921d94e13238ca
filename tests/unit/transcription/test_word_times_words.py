"""Words as openai/whisper groups them, on its own vocabularies."""

from random import Random
from typing import Any

import pytest
from whisper.timing import WordTiming, merge_punctuations
from whisper.tokenizer import get_tokenizer

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.transcription.word_times import WITH_THE_NEXT_WORD, WITH_THE_WORD_BEFORE, group_words
from tests.support.checkpoints import pocket_directory
from tests.support.tokens import make_tokenizer, words

TEXTS = {
    "en": ' She said: "It isn\'t 3,000 dollars (or so)", and left... "Really?" asked-he.',
    "de": " Grüß Gott! Straßenbahn-Haltestelle „Süd“ – 12.30 Uhr.",
    "fr": " L'été, c'est « déjà » fini ¿no?",
    "zh": "你好，世界！今天天气很好。「是吗？」",
    "ja": " これはテストです。ＯＫ？ 𠮷野家。",
    "ru": " Привет, мир! Ещё раз — да.",
}


@pytest.fixture(scope="module")
def multilingual() -> Tokenizer:
    return Tokenizer.from_directory(pocket_directory())


def theirs(tokens: list[int], language: str) -> list[str]:
    tokenizer: Any = get_tokenizer(True, language=language)
    texts, groups = tokenizer.split_to_word_tokens([*tokens, tokenizer.eot])
    timings = [WordTiming(t, g, 0, 0, 0) for t, g in zip(texts[:-1], groups[:-1], strict=True)]
    merge_punctuations(timings, WITH_THE_NEXT_WORD, WITH_THE_WORD_BEFORE)
    return [timing.word for timing in timings if timing.word]


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # it leaves its vocabulary file to the garbage collector
@pytest.mark.parametrize("language", list(TEXTS))
def test_words_are_openai_whispers(multilingual: Tokenizer, language: str) -> None:
    tokens = multilingual.encode(TEXTS[language])
    groups = group_words(tokens, multilingual, spaced=language not in ("zh", "ja"))
    assert [group.text for group in groups] == theirs(tokens, language)
    assert "".join(group.text for group in groups) == TEXTS[language]
    assert len(groups) > 3


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("language", ["en", "zh"])
def test_any_text_is_grouped_as_by_openai_whisper(multilingual: Tokenizer, language: str) -> None:
    """Random tokens that make whole characters, alone or, as of emoji, several together."""
    random = Random(4)
    whole = [token for token in range(50_257) if "\ufffd" not in multilingual.decode([token])]
    parts = [[token] for token in whole] + [multilingual.encode(character) for character in "🎉𠮷龘ꙮ"] * 5000
    for _ in range(60):
        tokens = [token for part in random.choices(parts, k=20) for token in part]
        ours = [group.text for group in group_words(tokens, multilingual, spaced=language == "en")]
        assert ours == theirs(tokens, language)


def test_bytes_that_make_no_character_hold_up_nothing() -> None:
    tokens = [*words("1"), *b"\xff\xe4", *words("2"), *words("3")]
    groups = group_words(tokens, make_tokenizer(), spaced=True)
    assert [(group.first, group.end) for group in groups] == [(0, 4), (4, 5)]
