"""Deepgram's words for a realtime session: results that change, final ones, ends of speech."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from asr_server.annexes.deepgram.shapes import Json, LiveQuery, Spoken, alternative, metadata, model_facts
from asr_server.annexes.realtime import client_events as client
from asr_server.annexes.realtime import server_events as out
from asr_server.annexes.realtime.session import NORMAL, End, Malformed, Said
from asr_server.api.models import ServedModel
from asr_server.errors import InvalidValue

MAX_QUOTED: Final = 400  # characters of a message that cannot be read


class _Control(msgspec.Struct):
    type: str


@dataclass
class _Item:
    """A turn with results to tell."""

    start_s: float = 0.0
    last_word_end_s: float | None = None
    final: list[out.Interim] = field(default_factory=list)  # last readings that are not told yet
    speakers: list[out.SpokenSegment] = field(default_factory=list)
    is_finalized: bool = False  # its client asked for the end
    end: out.Completed | out.Failed | None = None


class ListenDialect:
    def __init__(self, query: LiveQuery, model: ServedModel, request_id: str) -> None:
        self._query, self._model, self._request_id = query, model, request_id
        self._sha256 = hashlib.sha256()
        self._items: dict[str, _Item] = {}  # in the order of speech, in which they are told
        self._numbers: dict[str, int] = {}  # of the speakers, by name
        self._is_finalizing = False
        self._told_to_s = self._heard_to_s = 0.0
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

    def hear(self, position_s: float) -> Sequence[str]:
        self._heard_to_s = position_s
        return [json.dumps(each) for each in self._utterance_end()]

    def _messages(self, event: out.ServerEvent) -> Iterator[Json]:
        match event:
            case out.SpeechStarted():
                self._item(event.item_id).start_s = event.audio_start_ms / 1000
                if self._query.vad_events:
                    yield {"type": "SpeechStarted", "channel": [0], "timestamp": event.audio_start_ms / 1000}
            case out.Committed():
                self._item(event.item_id).is_finalized = self._is_finalizing
                self._is_finalizing = False
            case out.Interim():
                yield from self._on_reading(event)
            case out.SpokenSegment():
                self._item(event.item_id).speakers.append(event)
            case out.Completed() | out.Failed():
                self._item(event.item_id).end = event
                yield from self._told_items()
            case out.Error() if self._is_finalizing and self._items:  # the last turn is being read
                self._is_finalizing = False
                next(reversed(self._items.values())).is_finalized = True
            case out.Error() if self._is_finalizing:  # there is nothing to finalize
                self._is_finalizing = False
                yield self._final(_Item(is_finalized=True), is_last=True)
            case out.Error():
                yield _error("SchemaError", event.error.message)

    def _item(self, item_id: str) -> _Item:
        return self._items.setdefault(item_id, _Item())

    def _on_reading(self, event: out.Interim) -> Iterator[Json]:
        item = self._item(event.item_id)
        is_first = item is next(iter(self._items.values()))
        if is_first and item.final and not self._query.is_diarized:  # speakers are known at its end
            yield self._final(item)
        if event.is_final:
            item.final.append(event)
        elif is_first and event.text and self._query.interim_results:
            yield self._results(event.text, [self._spoken(word, item) for word in event.words])

    def _told_items(self) -> Iterator[Json]:
        """Tell the items that have ended, up to the first that has not."""
        for item_id, item in list(self._items.items()):
            if item.end is None:
                return
            del self._items[item_id]
            if item.final or isinstance(item.end, out.Completed):
                yield self._final(item, is_last=True)
            if isinstance(item.end, out.Failed):
                yield _error("TranscriptionError", item.end.error.message)
            self._last_word_end_s = item.last_word_end_s or self._last_word_end_s
            yield from self._utterance_end()

    def _final(self, item: _Item, is_last: bool = False) -> Json:
        text = " ".join(each.text for each in item.final)
        words = [self._spoken(word, item) for each in item.final for word in each.words]
        item.final.clear()
        results = self._results(text, words)
        if words:
            item.last_word_end_s = self._told_to_s = words[-1].end_s
        flags = {"is_final": True, "speech_final": is_last, "from_finalize": is_last and item.is_finalized}
        return results | flags

    def _results(self, text: str, words: Sequence[Spoken]) -> Json:
        start_s = words[0].start_s if words else self._told_to_s
        end_s = words[-1].end_s if words else start_s
        model_uuid, facts = model_facts(self._model)
        return {
            "type": "Results",
            "channel_index": [0, 1],
            "start": start_s,
            "duration": round(end_s - start_s, 3),
            "is_final": False,
            "speech_final": False,
            "from_finalize": False,
            "channel": {"alternatives": [alternative(text, words)]},
            "metadata": {"request_id": self._request_id, "model_info": facts, "model_uuid": model_uuid},
        }

    def _spoken(self, word: out.LiveWord, item: _Item) -> Spoken:
        middle_s = (word.start + word.end) / 2
        names = [each.speaker for each in item.speakers if each.start <= middle_s <= each.end]
        speaker = self._numbers.setdefault(names[0], len(self._numbers)) if names else None
        return Spoken(word.word, word.start, word.end, word.confidence or 0.0, speaker)

    def _utterance_end(self) -> Iterator[Json]:
        """Tell it once so much follows the last word without speech; text may come behind its audio."""
        last_s, wait_ms = self._last_word_end_s, self._query.utterance_end_ms
        silent_to_s = next(iter(self._items.values())).start_s if self._items else self._heard_to_s
        if wait_ms is not None and last_s is not None and silent_to_s - last_s >= wait_ms / 1000:
            self._last_word_end_s = None
            yield {"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": last_s}

    def close(self, position_s: float) -> Sequence[str]:
        facts = metadata(self._model, self._request_id, self._sha256.hexdigest(), position_s, channels=1)
        return (json.dumps({"type": "Metadata", **facts}),)


def _error(variant: str, message: str) -> Json:
    return {"type": "Error", "variant": variant, "description": message, "message": message}
