"""Chunks through an engine, and the same through transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import ChunkId, ChunkResult, DecodingOptions, Samples
from asr_server.engine import Engine, EngineConfig
from asr_server.engine.tokens import GenerationRules
from asr_server.model import Whisper, load_whisper
from asr_server.transport.messages import Event, Failed, LanguageDetected, Result, SetLanguage, Submit

DEFAULTS: dict[str, Any] = {"num_slots": 16, "encode_batch": 8, "compute_workers": 1, "lookahead": False}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint loaded once for many engines."""

    directory: Path
    model: Whisper
    tokenizer: Tokenizer
    rules: GenerationRules

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        int8: bool = False,
    ) -> Checkpoint:
        return cls(
            directory,
            load_whisper(directory, device, dtype, int8=int8),
            Tokenizer.from_directory(directory),
            GenerationRules.from_directory(directory),
        )

    def engine(self, **config: Any) -> Engine:
        """An engine with these fields of `EngineConfig`; the others are the same on every machine."""
        return Engine(self.model, self.tokenizer, self.rules, EngineConfig(**(DEFAULTS | config)))


def submit(engine: Engine, name: str, samples: Samples, options: DecodingOptions) -> ChunkId:
    id = ChunkId(name, 0)
    engine.handle(Submit(id, samples, options))
    return id


def run(engine: Engine) -> list[Event]:
    """Steps until nothing is left to do; every language question is answered with the likeliest."""
    events: list[Event] = []
    while engine.has_work:
        events += answer_languages(engine, engine.step())
    return events


def answer_languages(engine: Engine, events: list[Event]) -> list[Event]:
    for event in events:
        if isinstance(event, LanguageDetected):
            likeliest = max(event.probabilities, key=lambda code: event.probabilities[code])
            engine.handle(SetLanguage(event.id, likeliest))
    return events


def results(events: Sequence[Event]) -> dict[str, ChunkResult]:
    """By request; a failure is an error here."""
    failures = [event for event in events if isinstance(event, Failed)]
    assert not failures, failures
    return {event.id.handle_id: event.result for event in events if isinstance(event, Result)}


def transcribe(engine: Engine, clips: Sequence[Samples], options: DecodingOptions) -> list[ChunkResult]:
    for i, clip in enumerate(clips):
        submit(engine, str(i), clip, options)
    found = results(run(engine))
    return [found[str(i)] for i in range(len(clips))]


class Reference:
    """transformers on the same checkpoint, in float32."""

    def __init__(self, directory: Path) -> None:
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        loaded: Any = WhisperForConditionalGeneration.from_pretrained(directory)
        self.model = loaded.eval()
        self._encode = self.model.model.encoder.forward
        self._encoded: dict[bytes, Any] = {}
        self.model.model.encoder.forward = self._encode_once
        self.model.generation_config.max_length = None
        self.extractor: Any = WhisperFeatureExtractor.from_pretrained(directory)
        self.end_of_text = self.model.generation_config.eos_token_id

    def features(self, clips: Sequence[Samples]) -> torch.Tensor:
        features: torch.Tensor = self.extractor(
            list(clips), sampling_rate=16_000, return_tensors="pt"
        ).input_features
        return features

    def transcribe(
        self, clips: Sequence[Samples], language: str | None, max_new_tokens: int
    ) -> list[tuple[int, ...]]:
        multilingual = self.model.generation_config.is_multilingual
        rows = self.model.generate(
            self.features(clips),
            **({"language": language, "task": "transcribe"} if multilingual else {}),
            return_timestamps=True,
            max_new_tokens=max_new_tokens,
            num_beams=1,
            do_sample=False,
            force_unique_generate_call=True,
        ).tolist()
        prompt = 3 if multilingual else 1
        return [self._cut(row[prompt:]) for row in rows]

    def _encode_once(self, input_features: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """transformers encodes again for every question about the same clips; a test need not."""
        key = hashlib.sha256(input_features.numpy().tobytes()).digest()
        if key not in self._encoded:
            self._encoded[key] = self._encode(input_features, *rest, **named)
        return self._encoded[key]

    def _cut(self, row: list[int]) -> tuple[int, ...]:
        return tuple(row[: row.index(self.end_of_text)] if self.end_of_text in row else row)
