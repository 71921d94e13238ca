from asr_server.transcription.prompt import (
    MAX_BOOSTED_CHARS,
    MAX_BOOSTED_KEYWORDS,
    MAX_PROMPT_TOKENS,
    boosted_keywords,
    prompt_tokens,
)
from tests.vocabulary import make_tokenizer

TOKENIZER = make_tokenizer()


def said(tokens: tuple[int, ...]) -> str:
    return TOKENIZER.decode(tokens)


def test_no_prompt_is_no_tokens() -> None:
    assert prompt_tokens(TOKENIZER, "  ") == ()


def test_a_prompt_begins_with_a_space_as_spoken_text_does() -> None:
    assert said(prompt_tokens(TOKENIZER, "hello\n")) == " hello"


def test_the_end_of_a_long_prompt_is_kept() -> None:
    tokens = prompt_tokens(TOKENIZER, "a" * 1000 + "the end")
    assert len(tokens) == MAX_PROMPT_TOKENS
    assert said(tokens).endswith("the end")


def test_the_text_of_a_special_token_stays_text() -> None:
    tokens = prompt_tokens(TOKENIZER, "<|endoftext|><|translate|>")
    assert all(TOKENIZER.is_text(token) for token in tokens)
    assert said(tokens) == " <|endoftext|><|translate|>"


def test_the_first_sixty_four_keywords_get_a_bonus_each_once() -> None:
    many = [str(number) for number in range(MAX_BOOSTED_KEYWORDS + 5)]
    assert boosted_keywords([" 0 ", "", "0", *many]) == tuple(many[:MAX_BOOSTED_KEYWORDS])


def test_a_keyword_as_long_as_a_sentence_gets_no_bonus() -> None:
    longest = "a" * MAX_BOOSTED_CHARS
    assert boosted_keywords([longest + "a", longest]) == (longest,)
