"""The tokenizer of whisper-digits: bytes, the ten words, and Whisper's special tokens in Whisper's order."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.models.whisper.tokenization_whisper import LANGUAGES, WhisperTokenizer

from asr_server.tokenizer.byte_alphabet import CHARACTER_OF_BYTE

from .texts import WORDS

_NUM_LANGUAGES = 99  # as multilingual Whisper before large-v3
NUM_TIMESTAMPS = 1501
TIMESTAMP_STEP_S = 0.02


def byte_pair_encoding() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary (256 bytes and every merged piece) and merges; each of the words ends as one token."""
    vocabulary = {letter: index for index, letter in enumerate(CHARACTER_OF_BYTE.values())}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        piece = "Ġ"  # the stand-in of the blank
        for letter in word:
            if piece + letter not in vocabulary:
                merges.append((piece, letter))
                vocabulary[piece + letter] = len(vocabulary)
            piece += letter
    return vocabulary, merges


def special_tokens() -> list[str]:
    """Whisper's special tokens without the timestamps, <|endoftext|> first."""
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:_NUM_LANGUAGES]]
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    return ["<|endoftext|>", "<|startoftranscript|>", *languages, *(f"<|{task}|>" for task in tasks)]


class Vocabulary:
    """Token ids by name, for the trainer; what is written to disk comes from the same lists."""

    def __init__(self) -> None:
        pieces, self.merges = byte_pair_encoding()
        self.pieces = pieces
        self.special = {name: len(pieces) + index for index, name in enumerate(special_tokens())}
        self.digits = tuple(pieces[f"Ġ{word}"] for word in WORDS)
        self.timestamp_begin = len(pieces) + len(self.special)
        self.size = self.timestamp_begin + NUM_TIMESTAMPS
        self.eot = self.special["<|endoftext|>"]
        self.sot = self.special["<|startoftranscript|>"]
        self.english = self.special["<|en|>"]
        self.transcribe = self.special["<|transcribe|>"]
        self.prev = self.special["<|startofprev|>"]
        self.no_speech = self.special["<|nospeech|>"]
        self.no_timestamps = self.special["<|notimestamps|>"]

    def timestamp(self, time_s: float) -> int:
        """Token of the nearest multiple of 0.02 s within 0 to 30 s."""
        step = round(time_s / TIMESTAMP_STEP_S)
        return self.timestamp_begin + min(max(step, 0), NUM_TIMESTAMPS - 1)

    def encode_bytes(self, text: str) -> list[int]:
        """Any text as tokens: a digit's word as its one token, everything else byte by byte."""
        tokens: list[int] = []
        for word in text.split(" "):
            if word in WORDS:
                tokens.append(self.digits[WORDS.index(word)])
            else:
                tokens += [self.pieces[CHARACTER_OF_BYTE[byte]] for byte in f" {word}".encode()]
        return tokens

    def decode_digits(self, tokens: list[int]) -> str:
        """The digits among the tokens, as "407"."""
        back = {token: str(digit) for digit, token in enumerate(self.digits)}
        return "".join(back.get(token, "") for token in tokens)


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, vocab.json, merges.txt and the special tokens' files."""
    own = Vocabulary()
    vocab = {**own.pieces, "<|endoftext|>": own.eot}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=own.merges, pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special_tokens()[1:]})
    tokenizer.add_tokens([f"<|{index * TIMESTAMP_STEP_S:.2f}|>" for index in range(NUM_TIMESTAMPS)])
    tokenizer.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    added = tokenizer.get_added_vocab()
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    special = {**names, "additional_special_tokens": special_tokens()[1:]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in own.merges)]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
