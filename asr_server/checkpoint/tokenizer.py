"""Turn tokens into text and back, by byte-level BPE from a checkpoint's files.

Special tokens are found by name. In byte-level BPE (GPT-2), bytes that print in Latin-1 are themselves;
others take code points from 256.

`Timestamps` follows openai-whisper's rule (`transcribe.py`): two adjacent timestamps close a segment and
open the next; a single one at the end means that the window is read; an open segment was cut off, and
decoding continues from the last closed time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self
from unicodedata import east_asian_width

import msgspec
import tokenizers
from tokenizers import models, pre_tokenizers

from asr_server.checkpoint.files import (
    LANGUAGE_TOKEN,
    PUBLISHED_VOCABULARIES,
    read_json,
    read_optional_json,
    read_small,
)
from asr_server.core import POSITIONS_PER_S, ChunkResult, DecodingOptions
from asr_server.errors import CheckpointError

_NUM_TIMESTAMPS: Final = 1501  # from 0.00 to 30.00 s, at the end of every published vocabulary
LONG_LETTERS: Final = 3  # a digit, and a character of two columns, takes as long as so many letters
MAX_DECODED: Final = 1024  # texts that are kept: a segment is decoded for each report that holds it
_HIDDEN_BYTES = [byte for byte in range(256) if byte == ord(" ") or not chr(byte).isprintable()]
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in range(256)}
CHARACTER_OF_BYTE |= {byte: chr(256 + i) for i, byte in enumerate(_HIDDEN_BYTES)}
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that steer the decoder; None if the checkpoint lacks one."""

    end_of_text: int
    start_of_transcript: int
    start_of_prev: int | None
    no_speech: int | None
    no_timestamps: int
    timestamp_begin: int
    transcribe: int | None
    translate: int | None
    languages: dict[str, int]  # ISO code to id
    is_multilingual: bool

    @classmethod
    def from_files(cls, ids: Mapping[str, int], generation: Mapping[str, Any]) -> Self:
        """Find them among all added tokens by their texts, or by what generation_config.json says.

        Raises ValueError: a token that decoding needs is missing.
        """
        given = {name: value for name, value in generation.items() if value is not None}
        required: dict[str, Any] = {
            "<|endoftext|>": ids.get("<|endoftext|>"),
            "<|startoftranscript|>": given.get("decoder_start_token_id", ids.get("<|startoftranscript|>")),
            "<|notimestamps|>": given.get("no_timestamps_token_id", ids.get("<|notimestamps|>")),
        }
        missing = [name for name, token in required.items() if token is None]
        if missing:
            raise ValueError(f"not a Whisper tokenizer: {', '.join(missing)} missing")

        end_of_text, start_of_transcript, no_timestamps = map(int, required.values())
        by_name = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in ids}
        tasks = given.get("task_to_id") or by_name  # a checkpoint may know fewer tasks than tokens
        languages = _languages(ids, given)
        return cls(
            end_of_text=end_of_text,
            start_of_transcript=start_of_transcript,
            start_of_prev=given.get("prev_sot_token_id", ids.get("<|startofprev|>")),
            no_speech=ids.get("<|nospeech|>", ids.get("<|nocaptions|>")),
            no_timestamps=no_timestamps,
            timestamp_begin=no_timestamps + 1,
            transcribe=tasks.get("transcribe"),
            translate=tasks.get("translate"),
            languages=languages,
            is_multilingual=bool(given.get("is_multilingual", bool(languages))),
        )

    def prompt(
        self, options: DecodingOptions, language: str | None, num_positions: int
    ) -> tuple[list[int], int]:
        """Return the tokens before a chunk's text, and where <|startoftranscript|> is among them.

        The client's prompt keeps its last tokens, at most half the positions less one. Raises ValueError: the
        checkpoint cannot translate.
        """
        before: list[int] = []
        if options.prompt_tokens and self.start_of_prev is not None:
            before = [self.start_of_prev, *options.prompt_tokens[-(num_positions // 2 - 1) :]]
        return [*before, *self.sot_sequence(options, language)], len(before)

    def sot_sequence(self, options: DecodingOptions, language: str | None) -> list[int]:
        task = self.translate if options.task == "translate" else self.transcribe
        if options.task == "translate" and (task is None or not self.is_multilingual):
            raise ValueError("this checkpoint cannot translate")
        tokens = [self.start_of_transcript]
        if self.is_multilingual and language is not None:
            tokens.append(self.languages[language])
        if self.is_multilingual and task is not None:
            tokens.append(task)
        return tokens

    def candidate_languages(self, options: DecodingOptions) -> list[str]:
        """Return the languages to choose from; none for an English-only model."""
        if not self.is_multilingual:
            return []
        wanted = [code for code in options.candidate_languages if code in self.languages]
        return wanted or list(self.languages)


def _languages(ids: Mapping[str, int], generation: Mapping[str, Any]) -> dict[str, int]:
    named = generation.get("lang_to_id") or ids
    found = {name: token for name, token in named.items() if LANGUAGE_TOKEN.fullmatch(name)}
    return {name[2:-2]: token for name, token in sorted(found.items(), key=lambda item: item[1])}


def num_letters(text: str) -> int:
    letters = filter(str.isalnum, text)
    return sum(LONG_LETTERS if x.isdigit() or east_asian_width(x) in "FW" else 1 for x in letters)


class Tokenizer:
    """Text tokens and special tokens of one checkpoint.

    Text that spells a special token is plain text.
    """

    def __init__(
        self, text: tokenizers.Tokenizer, added: Mapping[str, int], generation: Mapping[str, Any]
    ) -> None:
        """`text` knows no `added` tokens (special ones and times); generation_config.json may be empty."""
        self.specials = SpecialTokens.from_files(added, generation)
        self.time_precision_s = 1 / POSITIONS_PER_S  # of one timestamp token
        self._text = text
        special_ids = set(added.values())
        self._bytes = {
            token: _raw_bytes(piece) for piece, token in text.get_vocab().items() if token not in special_ids
        }
        self._decoded = lru_cache(MAX_DECODED)(self._decode)

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Read tokenizer.json, else vocab.json, merges.txt and added_tokens.json.

        Raises FileNotFoundError, and CheckpointError for what is no Whisper tokenizer or another model's.
        """
        try:
            text, added = (
                _from_tokenizer_json(directory / "tokenizer.json")
                if (directory / "tokenizer.json").exists()
                else _from_vocabulary(directory)
            )
            _require_numbers(added)
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
        num_tokens = max(tokenizer.specials.timestamp_begin + _NUM_TIMESTAMPS, 1 + max(added.values()))
        if vocab_size in PUBLISHED_VOCABULARIES and num_tokens != vocab_size:
            raise CheckpointError(
                f"the tokenizer in {directory} has {num_tokens} tokens, the model {vocab_size}: "
                "it belongs to another model"
            )
        return tokenizer

    def is_text(self, token: int) -> bool:
        return token in self._bytes

    def decode_bytes(self, token: int) -> bytes:
        """Return a token's bytes, possibly parts of a character; empty for a special token."""
        return self._bytes.get(token, b"")

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode the text tokens; invalid bytes become U+FFFD."""
        return self._decoded(tuple(tokens))

    def num_letters(self, tokens: Iterable[int]) -> int:
        return num_letters(self.decode(tokens))

    def _decode(self, tokens: tuple[int, ...]) -> str:
        bytes_of = self._bytes.get
        return b"".join([bytes_of(token, b"") for token in tokens]).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(self._text.encode(text, add_special_tokens=False).ids)


def _raw_bytes(piece: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


def _from_tokenizer_json(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    description = read_json(path)
    added = {token["content"]: token["id"] for token in description["added_tokens"]}
    # Without its added tokens the tokenizer cannot be talked into a special token by the text.
    description |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(description).decode()), added


def _from_vocabulary(directory: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    if not (directory / "vocab.json").exists():
        raise FileNotFoundError(f"{directory} has neither tokenizer.json nor vocab.json")
    vocabulary: dict[str, int] = read_json(directory / "vocab.json")
    added: dict[str, int] = read_optional_json(directory / "added_tokens.json")
    added |= {
        piece: token for piece, token in vocabulary.items() if piece.startswith("<|") and piece.endswith("|>")
    }
    read_small(directory / "merges.txt")  # refuses what is no file, which the library would wait for
    text = tokenizers.Tokenizer(
        models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    )
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return text, added


def _require_numbers(added: Mapping[str, object]) -> None:
    wrong = [text for text, token in added.items() if type(token) is not int or token < 0]
    if wrong:
        raise ValueError(f"the id of {wrong[0]!r} is no whole number from 0 on")


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


MIN_TAIL_S: Final = 0.2  # a shorter unread tail holds no word


class Timestamps:
    def __init__(self, tokenizer: Tokenizer, duration_s: float) -> None:
        self._begin = tokenizer.specials.timestamp_begin
        self._precision_s = tokenizer.time_precision_s
        self.duration_s = duration_s

    def time_s(self, token: int) -> float:
        """Return the token's time, at most the end of the audio."""
        return min((token - self._begin) * self._precision_s, self.duration_s)

    def is_time(self, token: int) -> bool:
        return token >= self._begin

    def borders(self, tokens: Sequence[int]) -> list[int]:
        times = [at for at, token in enumerate(tokens) if token >= self._begin]
        return [at for before, at in pairwise(times) if at == before + 1]

    def tail(self, result: ChunkResult, options: DecodingOptions) -> tuple[int, float | None]:
        """Return how many tokens are read, and where decoding continues; None if all is read.

        The last reading allowed has no tail, nor has a limit set by the client.
        """
        if options.is_last_part or options.max_new_tokens is not None:
            return len(result.tokens), None
        closed = self._last_closed(result)
        tail_s = self.time_s(result.tokens[closed]) if closed is not None else 0.0
        if closed is None or not 0.0 < tail_s <= self.duration_s - MIN_TAIL_S:
            return len(result.tokens), None  # nowhere to go on from, or nothing there
        return closed + 1, tail_s

    def _last_closed(self, result: ChunkResult) -> int | None:
        tokens, borders = result.tokens, self.borders(result.tokens)
        last = len(tokens) - 1
        if last > 0 and self.is_time(tokens[last]) and last not in borders:
            return last if result.finish_reason == "length" else None
        return borders[-1] - 1 if borders else None
