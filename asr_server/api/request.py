"""Turns a request's fields into decoding options that this model can honour. Used by `response.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from asr_server.api.events import EventWriter
from asr_server.api.fields import parse_fields, split_unknown
from asr_server.api.schemas import (
    DEFAULT_SPEAKERS,
    LAYOUT_FIELDS,
    AudioFields,
    TranscriptionFields,
    TranslationFields,
)
from asr_server.config import Settings, naming
from asr_server.core import DecodingOptions, VoiceChunking
from asr_server.errors import InvalidValue, ModelNotFound
from asr_server.formats import DEFAULTS, RenderOptions, ResponseFormat, SubtitleLayout
from asr_server.transcription import Transcriber, prompt_tokens
from asr_server.transcription.language import ENGLISH

F = TypeVar("F", bound=AudioFields)


@dataclass(frozen=True)
class TranscriptionRequest:
    options: DecodingOptions
    response_format: ResponseFormat
    stream: bool
    render_options: RenderOptions
    with_usage: bool
    with_running_usage: bool
    with_segments: bool
    ignored_fields: tuple[str, ...]  # names that the API does not have, where the settings let them pass
    speakers: tuple[str, ...]  # by channel; empty: the channels are mixed
    chunking: VoiceChunking | None

    def event_writer(self) -> EventWriter:
        verbose = self.render_options if self.with_segments else None
        return EventWriter(
            self.render_options.with_logprobs,
            self.with_usage,
            self.with_running_usage,
            verbose,
            self.response_format == "diarized_json",
        )


def parse_transcription_request(
    pairs: list[tuple[str, str]], transcriber: Transcriber, settings: Settings
) -> TranscriptionRequest:
    """Raises InvalidValue, ModelNotFound."""
    fields, ignored = _parse(pairs, TranscriptionFields, settings)
    check_model(fields.model, settings)
    language, candidates = transcriber.languages.choice(
        fields.language, fields.languages, ("language", "languages[]")
    )
    # With timestamps whatever the format, as openai-whisper decodes: they tell when a tail was left unread.
    keywords = [*fields.keywords, *fields.hotwords.split(",")]
    render_options = _render_options(fields)
    options = DecodingOptions(
        language=language,
        candidate_languages=candidates,
        prompt_tokens=prompt_tokens(transcriber.tokenizer, fields.prompt, keywords),
        timestamps=True,
        token_logprobs=render_options.with_logprobs,
        early_results=fields.stream,
        word_timestamps=render_options.with_words or render_options.layout.needs_words,
        **_sampling(fields, settings),  # type: ignore[arg-type]
    )
    chunking = fields.chunking_strategy.voice_chunking() if fields.chunking_strategy else None
    return _request(fields, options, ignored, render_options, chunking)


def parse_translation_request(
    pairs: list[tuple[str, str]], transcriber: Transcriber, settings: Settings
) -> TranscriptionRequest:
    """Raises InvalidValue, ModelNotFound."""
    fields, ignored = _parse(pairs, TranslationFields, settings)
    check_model(fields.model, settings)
    if not transcriber.can_translate:
        raise InvalidValue(f"The model '{fields.model}' cannot translate.", "model")
    if fields.to_language and transcriber.languages.code(fields.to_language, "to_language") != ENGLISH:
        raise InvalidValue(
            "'to_language' can be English only: Whisper translates into nothing else.", "to_language"
        )
    options = DecodingOptions(
        task="translate",
        early_results=fields.stream,
        prompt_tokens=prompt_tokens(transcriber.tokenizer, fields.prompt),
        timestamps=True,
        **_sampling(fields, settings),  # type: ignore[arg-type]
    )
    return _request(fields, options, ignored)


def _parse(
    pairs: list[tuple[str, str]], fields_type: type[F], settings: Settings
) -> tuple[F, tuple[str, ...]]:
    ignored: tuple[str, ...] = ()
    if settings.unknown_fields == "ignore":
        pairs, ignored = split_unknown(pairs, fields_type)
    return parse_fields(pairs, fields_type), ignored


def check_model(name: str, settings: Settings) -> None:
    if name not in settings.model_names:
        served = ", ".join(settings.model_names)
        raise ModelNotFound(
            f"The model '{name[:200]}' does not exist. Served here: {served}. "
            f"Further names are given by {naming('model_alias')}."
        )


def _sampling(fields: AudioFields, settings: Settings) -> dict[str, object]:
    return {
        "temperatures": (fields.temperature,) if fields.temperature else settings.temperatures,
        "top_p": fields.top_p,
        "top_k": max(0, fields.top_k),  # vLLM's -1 is off too
        "min_p": fields.min_p,
        "repetition_penalty": fields.repetition_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "seed": fields.seed,
        "condition_on_previous_text": fields.condition_on_previous_text,
        "multilingual": fields.multilingual,
        "max_new_tokens": fields.max_completion_tokens,
    }


def _render_options(fields: TranscriptionFields) -> RenderOptions:
    granularities = fields.timestamp_granularities or ["segment"]
    return RenderOptions(
        with_logprobs="logprobs" in fields.include,
        with_segments="segment" in granularities,
        with_words="word" in granularities,
        layout=SubtitleLayout(**{name: getattr(fields, name) for name in LAYOUT_FIELDS}),
    )


def _request(
    fields: AudioFields,
    options: DecodingOptions,
    ignored_fields: tuple[str, ...],
    render_options: RenderOptions = DEFAULTS,
    chunking: VoiceChunking | None = None,
) -> TranscriptionRequest:
    names = tuple(fields.known_speaker_names) or DEFAULT_SPEAKERS
    return TranscriptionRequest(
        options,
        fields.response_format,
        fields.stream,
        render_options,
        fields.stream_include_usage,
        fields.stream_continuous_usage_stats,
        fields.stream_include_segments,
        ignored_fields,
        names if fields.channels == "split" else (),
        chunking,
    )
