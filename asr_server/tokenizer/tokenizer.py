"""Turns tokens into text and text into tokens (byte-level BPE), on the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from asr_server.checkpoint import CheckpointError, read_json, read_optional_json
from asr_server.core import POSITIONS_PER_S
from asr_server.tokenizer.byte_alphabet import BYTE_OF_CHARACTER
from asr_server.tokenizer.specials import SpecialTokens


class Tokenizer:
    """Text tokens and special tokens of one checkpoint.

    Special tokens take part neither in `encode` nor in `decode`: text that spells one is plain text.
    """

    def __init__(
        self, text: tokenizers.Tokenizer, added: Mapping[str, int], generation: Mapping[str, Any]
    ) -> None:
        """
        Args:
            text: encodes and decodes plain text; knows no added tokens.
            added: the text of every added (special or timestamp) token, and its id.
            generation: generation_config.json, empty where the checkpoint has none.
        """
        self.specials = SpecialTokens.from_files(added, generation)
        self.time_precision_s = 1 / POSITIONS_PER_S  # of one timestamp token
        self._text = text
        special_ids = set(added.values())
        self._bytes = {
            token: _raw_bytes(piece) for piece, token in text.get_vocab().items() if token not in special_ids
        }

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Reads tokenizer.json, or vocab.json, merges.txt and added_tokens.json where that is absent.

        Raises:
            FileNotFoundError: the directory holds neither.
            CheckpointError: what it holds is no Whisper tokenizer, or another model's.
        """
        try:
            text, added = (
                _from_tokenizer_json(directory / "tokenizer.json")
                if (directory / "tokenizer.json").exists()
                else _from_vocabulary(directory)
            )
            tokenizer = cls(text, added, read_optional_json(directory / "generation_config.json"))
        except OSError:
            raise
        except Exception as error:  # the library has no type of its own for a file that it cannot use
            raise CheckpointError(f"the tokenizer in {directory} cannot be used: {_reason(error)}") from error
        vocab_size = read_optional_json(directory / "config.json").get("vocab_size")
        if vocab_size and tokenizer.specials.no_timestamps >= vocab_size:
            raise CheckpointError(
                f"the tokenizer in {directory} has ids beyond the {vocab_size} tokens of the model: "
                "it belongs to another model"
            )
        return tokenizer

    def is_text(self, token: int) -> bool:
        return token in self._bytes

    def decode_bytes(self, token: int) -> bytes:
        """The raw bytes of one token, which need not be whole characters; empty for a special token."""
        return self._bytes.get(token, b"")

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the text tokens among these; bytes that make no character become U+FFFD."""
        return b"".join(map(self.decode_bytes, tokens)).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(self._text.encode(text, add_special_tokens=False).ids)


def _raw_bytes(piece: str) -> bytes:
    """A vocabulary entry as bytes; one outside the byte alphabet is taken literally."""
    if all(character in BYTE_OF_CHARACTER for character in piece):
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    return piece.encode()


def _from_tokenizer_json(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    description = read_json(path)
    added = {token["content"]: token["id"] for token in description["added_tokens"]}
    # Without its added tokens the tokenizer cannot be talked into a special token by the text.
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(description)), added


def _from_vocabulary(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    if not (directory / "vocab.json").exists():
        raise FileNotFoundError(f"{directory} has neither tokenizer.json nor vocab.json")
    vocabulary: dict[str, int] = read_json(directory / "vocab.json")
    added: dict[str, int] = read_optional_json(directory / "added_tokens.json")
    added |= {
        piece: token for piece, token in vocabulary.items() if piece.startswith("<|") and piece.endswith("|>")
    }
    text = tokenizers.Tokenizer(
        models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    )
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return text, added


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)
