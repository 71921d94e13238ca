"""A small Whisper vocabulary for tests that need tokens but no model: the digits, bytes, special tokens."""

from functools import cache

import tokenizers
from tokenizers import models, pre_tokenizers

from asr_server.checkpoint.tokenizer import CHARACTER_OF_BYTE, Tokenizer
from tests.support.speech import WORDS

_BYTES = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
_PIECES = _BYTES + [CHARACTER_OF_BYTE[ord(" ")] + word for word in WORDS]


@cache
def make_tokenizer(languages: tuple[str, ...] = ("en", "de", "zh")) -> Tokenizer:
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in languages)]
    names += ["<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    names += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    text = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(_PIECES)}, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    added = {name: len(_PIECES) + i for i, name in enumerate(names)}
    return Tokenizer(text, added, {"is_multilingual": len(languages) > 1})


def word(digit: int) -> int:
    """The token of " zero", " one" ..."""
    return len(_BYTES) + digit


def words(digits: str) -> tuple[int, ...]:
    return tuple(word(int(digit)) for digit in digits)


TOKENIZER = make_tokenizer()


def t(time_s: float) -> int:
    """The timestamp token of a time."""
    return TOKENIZER.specials.timestamp_begin + round(time_s / TOKENIZER.time_precision_s)


def spell(text: str) -> tuple[int, ...]:
    """Any text, a token a byte."""
    return tuple(text.encode())
