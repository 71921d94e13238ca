import msgspec
import pytest

from asr_server.transcription.progress import PreviousText
from asr_server.transcription.segments import DecodedPart, Span
from asr_server.transcription.transcriber import boosted_keywords, prompt_tokens
from tests.support.fake_replica import say
from tests.support.tokens import TOKENIZER, words


def said(tokens: tuple[int, ...]) -> str:
    return TOKENIZER.decode(tokens)


def test_a_prompt_begins_with_a_space_as_spoken_text_does() -> None:
    assert said(prompt_tokens(TOKENIZER, "hello\n")) == " hello"


def test_the_end_of_a_long_prompt_is_kept() -> None:
    tokens = prompt_tokens(TOKENIZER, "a" * 1000 + "the end")
    assert len(tokens) == 223
    assert said(tokens).endswith("the end")


def test_the_text_of_a_special_token_stays_text() -> None:
    tokens = prompt_tokens(TOKENIZER, "<|endoftext|><|translate|>")
    assert all(TOKENIZER.is_text(token) for token in tokens)
    assert said(tokens) == " <|endoftext|><|translate|>"


def test_the_first_sixty_four_keywords_get_a_bonus_each_once() -> None:
    many = [str(number) for number in range(64 + 5)]
    assert boosted_keywords([" 0 ", "", "0", *many]) == tuple(many[:64])


def part_of(digits: str, temperature: float, num_read: int = 9) -> DecodedPart:
    result = msgspec.structs.replace(say(*words("1")), temperature=temperature)
    spans = tuple(Span(0.0, 1.0, words(digit), (-0.1,)) for digit in digits)
    return DecodedPart(0.0, 1.0, result, spans, num_read)


def test_the_text_so_far_follows_the_requests_prompt() -> None:
    text = PreviousText(words("9"))
    text.add(part_of("12", 0.0))
    text.add(part_of("3", 0.5))
    assert text.tokens == words("9123")
    text.add(part_of("4" * 222, 0.0))
    assert text.tokens == words("3" + "4" * 222)


@pytest.mark.parametrize(("num_read", "kept"), [(1, ""), (0, "9")])
def test_text_of_a_high_temperature_ends_the_prompt_but_silence_does_not(num_read: int, kept: str) -> None:
    text = PreviousText(words("9"))
    text.add(part_of("", 0.6, num_read))
    assert text.tokens == words(kept)
