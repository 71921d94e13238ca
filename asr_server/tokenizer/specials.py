"""Whisper's special tokens, read by name from a checkpoint's files: no id is written down here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the tokens that steer the decoder. None: this checkpoint does not have it."""

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
    def from_files(cls, ids: Mapping[str, int], generation: Mapping[str, Any]) -> SpecialTokens:
        """
        Args:
            ids: every added token of the tokenizer, by its text.
            generation: generation_config.json, or what there is of it.

        Raises:
            ValueError: a token without which nothing can be decoded is missing.
        """
        no_timestamps = generation.get("no_timestamps_token_id", ids.get("<|notimestamps|>"))
        required = {
            "<|endoftext|>": ids.get("<|endoftext|>"),
            "<|startoftranscript|>": generation.get(
                "decoder_start_token_id", ids.get("<|startoftranscript|>")
            ),
            "<|notimestamps|>": no_timestamps,
        }
        missing = [name for name, token in required.items() if token is None]
        if missing:
            raise ValueError(f"not a Whisper tokenizer: {', '.join(missing)} missing")

        by_name = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in ids}
        tasks = generation.get("task_to_id") or by_name  # a checkpoint may know fewer tasks than tokens
        languages = _languages(ids, generation)
        return cls(
            end_of_text=ids["<|endoftext|>"],
            start_of_transcript=int(required["<|startoftranscript|>"]),
            start_of_prev=generation.get("prev_sot_token_id", ids.get("<|startofprev|>")),
            no_speech=ids.get("<|nospeech|>", ids.get("<|nocaptions|>")),
            no_timestamps=int(no_timestamps),
            timestamp_begin=int(no_timestamps) + 1,
            transcribe=tasks.get("transcribe"),
            translate=tasks.get("translate"),
            languages=languages,
            is_multilingual=bool(generation.get("is_multilingual", bool(languages))),
        )


def _languages(ids: Mapping[str, int], generation: Mapping[str, Any]) -> dict[str, int]:
    """ISO code to id: the checkpoint's own list where it has one, else every token that looks like one."""
    named = generation.get("lang_to_id") or ids
    found = {name: token for name, token in named.items() if _LANGUAGE.fullmatch(name)}
    return {name[2:-2]: token for name, token in sorted(found.items(), key=lambda item: item[1])}
