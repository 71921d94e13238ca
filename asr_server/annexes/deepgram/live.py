"""Deepgram's words for a realtime session: results that change, final ones, ends of speech."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from asr_server.annexes.deepgram.messages import Json, Spoken, alternative, metadata, model_facts
from asr_server.annexes.deepgram.query import LiveQuery
from asr_server.annexes.realtime import client_events as client
from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime.session import NORMAL, End, Malformed, Said
from asr_server.api.models import ServedModel
from asr_server.errors import InvalidValue

MAX_QUOTED: Final = 400  # characters of a message that cannot be read


class _Control(msgspec.Struct):
    type: str


class ListenDialect:
    def __init__(self, query: LiveQuery, model: ServedModel, request_id: str) -> None:
        self._query, self._model, self._request_id = query, model, request_id
        self._sha256 = hashlib.sha256()
        self._final: list[out.Interim] = []  # readings of the item that are not sent yet
        self._speakers: list[out.SpokenSegment] = []  # of the item
        self._numbers: dict[str, int] = {}  # of the speakers, by name
        self._is_speaking = self._is_finalizing = False
        self._finalized: set[str] = set()  # items
        self._told_to_s = 0.0
        self._last_word_end_s: float | None = None  # of the speech whose end is to be told

    # -- In --

    def read(self, message: Mapping[str, Any]) -> Sequence[Said]:
        if message.get("bytes"):
            data: bytes = message["bytes"]
            self._sha256.update(data)
            return (client.AppendAudio(audio=data),)
        text = message.get("text")
        if not text:  # an empty message of bytes ended the stream before there was `CloseStream`
            return (End(NORMAL, ""),)
        try:
            kind = msgspec.json.decode(text, type=_Control).type
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            kind = ""
        match kind:
            case "KeepAlive":
                return ()
            case "Finalize":
                self._is_finalizing = True
                return (client.CommitAudio(),)
            case "CloseStream":
                return (End(NORMAL, ""),)
        return (Malformed(InvalidValue(f"Not a message of this stream: {text[:MAX_QUOTED]}"), None),)

    # -- Out --

    def write(self, event: out.ServerEvent) -> Sequence[str]:
        return [json.dumps(each, ensure_ascii=False) for each in self._messages(event)]

    def _messages(self, event: out.ServerEvent) -> Iterable[Json]:
        match event:
            case out.SpeechStarted():
                self._is_speaking = True
                if self._query.vad_events:
                    yield {"type": "SpeechStarted", "channel": [0], "timestamp": event.audio_start_ms / 1000}
            case out.SpeechStopped():
                self._is_speaking = False
            case out.Committed():
                if self._is_finalizing:
                    self._finalized.add(event.item_id)
                self._is_finalizing = False
            case out.Interim():
                if not self._query.is_diarized:
                    yield from self._take_final(is_last=False)
                if event.is_final:
                    self._final.append(event)
                elif event.text and self._query.interim_results:
                    yield self._results(event.text, event.words, is_final=False)
            case out.SpokenSegment():
                self._speakers.append(event)
            case out.Completed():
                yield from self._take_final(is_last=True, from_finalize=event.item_id in self._finalized)
                self._finalized.discard(event.item_id)
                self._speakers.clear()
            case out.Failed():
                self._final.clear()
                yield _error("TranscriptionError", event.error.message)
            case out.Error() if self._is_finalizing:  # there is nothing to finalize
                self._is_finalizing = False
                yield self._results("", (), is_final=True, is_last=True, from_finalize=True)
            case out.Error():
                yield _error("SchemaError", event.error.message)

    def _take_final(self, is_last: bool, from_finalize: bool = False) -> Iterable[Json]:
        if not self._final and not is_last:
            return
        text = " ".join(each.text for each in self._final)
        words = [word for each in self._final for word in each.words]
        self._final.clear()
        if words:
            self._last_word_end_s = words[-1].end
        yield self._results(text, words, True, is_last, from_finalize)

    def _results(
        self,
        text: str,
        words: Sequence[out.LiveWord],
        is_final: bool,
        is_last: bool = False,
        from_finalize: bool = False,
    ) -> Json:
        start_s = words[0].start if words else self._told_to_s
        end_s = words[-1].end if words else start_s
        if is_final:
            self._told_to_s = end_s
        model_uuid, facts = model_facts(self._model)
        return {
            "type": "Results",
            "channel_index": [0, 1],
            "start": start_s,
            "duration": round(end_s - start_s, 3),
            "is_final": is_final,
            "speech_final": is_last,
            "from_finalize": from_finalize,
            "channel": {"alternatives": [alternative(text, [self._spoken(word) for word in words])]},
            "metadata": {"request_id": self._request_id, "model_info": facts, "model_uuid": model_uuid},
        }

    def _spoken(self, word: out.LiveWord) -> Spoken:
        return Spoken(word.word, word.start, word.end, word.confidence or 0.0, self._speaker(word))

    def _speaker(self, word: out.LiveWord) -> int | None:
        middle_s = (word.start + word.end) / 2
        for segment in self._speakers:
            if segment.start <= middle_s <= segment.end:
                return self._numbers.setdefault(segment.speaker, len(self._numbers))
        return None

    def hear(self, position_s: float) -> Sequence[str]:
        """Tell the end of an utterance, once so much follows its last word without speech."""
        last_s, wait_ms = self._last_word_end_s, self._query.utterance_end_ms
        if wait_ms is None or last_s is None or self._is_speaking or position_s - last_s < wait_ms / 1000:
            return ()
        self._last_word_end_s = None
        return (json.dumps({"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": last_s}),)

    def close(self, position_s: float) -> Sequence[str]:
        facts = metadata(self._model, self._request_id, self._sha256.hexdigest(), position_s, channels=1)
        return (json.dumps({"type": "Metadata", **facts}),)


def _error(variant: str, message: str) -> Json:
    return {"type": "Error", "variant": variant, "description": message, "message": message}
