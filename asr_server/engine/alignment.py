"""Finds when each token was said, from the attention of the decoder's alignment heads to the audio.

The method is openai/whisper's (timing.py): the text is fed once more, without timestamps and without the text
before it; each head's attention is normalised over the tokens and smoothed over time; the mean of the heads
is what dynamic time warping lays the tokens along, frame by frame in order. The audio's keys are those in the
slot. Beyond that method, every token has a position of its own; and where a text leaves a tail of the audio
unread, it is aligned with the audio before that tail alone: the tail's words are aligned when it is read
again. Runs in the replica's process. Used by `runner.py`, `engine.py` and `ranks.py`; knows tokens, no words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.checkpoint.tokenizer import Timestamps, Tokenizer
from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE, ChunkResult
from asr_server.engine.active_chunk import ActiveChunk, sot_sequence
from asr_server.engine.cuda import HostCopy, Transfers
from asr_server.model import DecoderCache, Whisper
from asr_server.model.cache import Slots

Matrix = npt.NDArray[np.floating]


def first_frames(gain: Matrix, share_frames: bool = False) -> npt.NDArray[np.intp]:
    """Returns the frame with which each row begins on the path of the greatest sum, from the first row and
    frame to the last. A row is a text token, a frame an encoder position.

    A step of the path goes to the next frame, and stays in its row or goes on to the next one, so that every
    row has a frame of its own. Within a row the cheapest way to each frame is a running minimum: of what
    reaching an earlier frame from the row above costs, less the costs up to there. So a row is a few
    operations on arrays, and the way back needs one look a row.

    Args:
        gain: [rows, frames], the gain of a path for having a row at a frame.
        share_frames: a step may also go to the next row in the same frame, as openai/whisper's path does.
            More rows than frames cannot do otherwise.
    """
    num_rows, num_frames = gain.shape
    share_frames = share_frames or num_rows > num_frames
    up_to = np.zeros((num_rows, num_frames + 1))  # costs of a row's frames before each one
    np.cumsum(-gain.astype(np.float64), axis=1, out=up_to[:, 1:])
    reached = np.full((num_rows + 1, num_frames + 1), np.inf)  # a row and a column before the first ones
    reached[0, 0] = 0.0
    entered = np.empty((num_rows, num_frames))
    for row in range(num_rows):
        above = reached[row]
        np.minimum(above[:-1], above[1:] if share_frames else np.inf, out=entered[row])
        entered[row] -= up_to[row, :-1]
        np.minimum.accumulate(entered[row], out=reached[row + 1, 1:])
        reached[row + 1, 1:] += up_to[row, 1:]
    return _way_back(entered, reached, share_frames)


def _way_back(entered: Matrix, reached: Matrix, share_frames: bool) -> npt.NDArray[np.intp]:
    first = np.empty(len(entered), np.intp)
    last = entered.shape[1] - 1  # frame of the row at hand
    for row in range(len(entered) - 1, -1, -1):
        first[row] = frame = int(np.argmin(entered[row, : last + 1]))
        is_shared = share_frames and reached[row, frame] >= reached[row, frame + 1]
        last = frame if is_shared else frame - 1
    return first


SAMPLES_PER_POSITION = SAMPLE_RATE // POSITIONS_PER_S  # of the encoder's output
SECONDS_PER_POSITION = SAMPLES_PER_POSITION / SAMPLE_RATE
ALIGN_BATCH = 4  # sequences aligned together, a step: bounds the memory and the time that it takes
MEDIAN_WIDTH = 7
# Exchanges after which the middle one of seven values is their median (a pruned sorting network).
_EXCHANGES = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)  # fmt: skip
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class PendingAlignment:
    """A result whose token times are still on the device."""

    sequence: ActiveChunk
    result: ChunkResult
    num_tokens: int  # text tokens that are to have times
    # [2, rows, positions]: what it is worth to lay a row at a position, and its attention. Summed over heads,
    # a row for each text token, a position for each 20 ms of the audio: 1.2 MB for 100 tokens in 30 s.
    sums: HostCopy

    def is_ready(self) -> bool:
        return self.sums.is_ready()

    def aligned_result(self) -> ChunkResult:
        """Waits until the device is done, and returns the result with its token times."""
        gain, attention = self.sums.array()
        first = first_frames(gain)
        peaks = _peaks(attention, first)
        return msgspec.structs.replace(
            self.result,
            token_times_s=_of_length(first * SECONDS_PER_POSITION, self.num_tokens + 1),
            token_peaks_s=_of_length((peaks + 0.5) * SECONDS_PER_POSITION, self.num_tokens),
            pauses_s=tuple((start_s, end_s) for start_s, end_s in self.sequence.pauses.tolist()),
        )


def _peaks(attention: Matrix, first: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """The position that each row attends to most, among those from its first to the next row's."""
    ends = np.maximum([*first[1:], attention.shape[1]], first + 1)
    spans = zip(attention, first.tolist(), ends.tolist(), strict=True)
    return np.array([start + np.argmax(row[start:end]) for row, start, end in spans])


def _of_length(times_s: npt.NDArray[np.floating], length: int) -> tuple[float, ...]:
    """Cuts or extends to `length`: tokens without a position of their own get the last time."""
    values = times_s[:length].tolist()
    return (*values, *values[-1:] * (length - len(values)))


class Aligner:
    """Works on slots whose sequences are finished; overwrites what the cache holds of their text."""

    def __init__(
        self, model: Whisper, cache: DecoderCache, tokenizer: Tokenizer, transfers: Transfers
    ) -> None:
        self._model, self._cache, self._tokenizer, self._transfers = model, cache, tokenizer, transfers
        self._num_heads = sum(map(len, model.alignment_heads.values()))  # of all shards
        # On CPU one head at a time, whose attention the processor's cache can hold. As tensors: a list as an
        # index is copied to the device at each use, and the host waits for that.
        heads_at_once = 1 if model.device.type == "cpu" else model.sizes.decoder_heads
        self._heads: dict[int, list[Tensor]] = {}
        for layer, heads in model.alignment_heads.items():
            own = model.shard.heads(heads, model.sizes.decoder_heads)
            index = torch.tensor(own, dtype=torch.long, device=model.device)
            self._heads[layer] = [index[i : i + heads_at_once] for i in range(0, len(own), heads_at_once)]

    def start(
        self, finished: Sequence[tuple[ActiveChunk, ChunkResult]], slots: Slots
    ) -> list[PendingAlignment]:
        """Aligns the sequences in these slots, or on CUDA begins to."""
        texts = [self._text(sequence, result) for sequence, result in finished]
        sums = [
            torch.zeros(2, text.num_rows, text.num_positions, device=self._model.device) for text in texts
        ]
        numbers = [sequence.slot for sequence, _ in finished]
        for layer, queries in self._queries(slots, numbers, texts):
            for (sequence, _), text, query, (gain, attention) in zip(
                finished, texts, queries, sums, strict=True
            ):
                keys = self._cache.audio_keys(layer, sequence.audio_slot, gain.shape[1])
                self._add_layer(gain, attention, text, layer, query, keys)
        sums = [self._model.shard.sum(each) / self._num_heads for each in sums]
        return [
            PendingAlignment(sequence, result, text.num_text, self._transfers.to_host(each))
            for (sequence, result), text, each in zip(finished, texts, sums, strict=True)
        ]

    def _text(self, sequence: ActiveChunk, result: ChunkResult) -> _Text:
        specials, duration_s = self._tokenizer.specials, len(sequence.samples) / SAMPLE_RATE
        prompt = [*sot_sequence(sequence.options, sequence.language, specials), specials.no_timestamps]
        num_read, tail_s = Timestamps(self._tokenizer, duration_s).tail(result, sequence.options)
        text = [token for token in result.tokens[:num_read] if self._tokenizer.is_text(token)]
        tokens = [*prompt, *text, specials.end_of_text][: self._model.sizes.text_positions]
        num_samples = len(sequence.samples) if tail_s is None else round(tail_s * SAMPLE_RATE)
        return _Text(tokens, len(prompt) - 1, len(text), self._num_positions(num_samples))

    def _num_positions(self, num_samples: int) -> int:
        """Returns how many positions of the encoder's output so many samples cover."""
        return min(max(1, num_samples // SAMPLES_PER_POSITION), self._model.sizes.audio_positions)

    def _queries(
        self, slots: Slots, numbers: Sequence[int], texts: Sequence[_Text]
    ) -> Iterator[tuple[int, Tensor]]:
        """Returns each alignment layer's queries, [B, T, H, d]; after a text's end they are noise."""
        device, end_of_text = self._model.device, self._tokenizer.specials.end_of_text
        longest = max(len(text.tokens) for text in texts)
        padded = [text.tokens + [end_of_text] * (longest - len(text.tokens)) for text in texts]
        tokens = self._transfers.to_device(torch.tensor(padded))
        positions = torch.arange(longest, device=device).expand_as(tokens)
        rows = self._cache.rows(slots, positions, context=longest)
        self._cache.text_ends.extend(numbers, longest)
        last = max(self._model.alignment_heads)
        for layer, queries in enumerate(self._model.decoder.audio_queries(tokens, positions, rows)):
            if layer in self._model.alignment_heads:
                yield layer, queries
            if layer == last:
                return

    def _add_layer(
        self, gain: Tensor, attention: Tensor, text: _Text, layer: int, query: Tensor, keys: Tensor
    ) -> None:
        """Adds the layer's heads to `gain` and `attention`: query [T, H, d], keys [H, d, positions]."""
        rows = slice(text.first_row, text.first_row + text.num_rows)
        for chosen in self._heads[layer]:
            scores = query[: len(text.tokens), chosen].transpose(0, 1).float() @ keys[chosen].float()
            weights = scores.softmax(-1)
            attention += weights[:, rows].sum(0)
            gain += smooth(normalise(weights)[:, rows]).sum(0)


class _Text(NamedTuple):
    """The tokens fed to the decoder: the prompt, the text, end-of-text."""

    tokens: list[int]
    first_row: int  # the position that predicts the first text token
    num_text: int  # text tokens, of which the last ones may have found no position
    num_positions: int  # of the encoder's output, that the text is laid along

    @property
    def num_rows(self) -> int:
        """Positions that predict a text token, and the one that predicts the end."""
        return min(self.num_text + 1, len(self.tokens) - self.first_row)


def normalise(attention: Tensor) -> Tensor:
    """Return how far each token's attention [H, T, positions] lies above the mean of all tokens there."""
    std, mean = torch.std_mean(attention, dim=1, keepdim=True, correction=0)
    return (attention - mean) / std.clamp_(min=_TINY)


def smooth(x: Tensor) -> Tensor:
    """Medians of 7 neighbours [..., N], mirrored at both ends. A tenth of the time that sorting takes."""
    length = x.shape[-1]
    if length <= MEDIAN_WIDTH // 2:
        return x
    padded = F.pad(x, (MEDIAN_WIDTH // 2, MEDIAN_WIDTH // 2), mode="reflect")
    shifted = [padded[..., i : i + length] for i in range(MEDIAN_WIDTH)]
    for low, high in _EXCHANGES:
        a, b = shifted[low], shifted[high]
        shifted[low], shifted[high] = torch.minimum(a, b), torch.maximum(a, b)
    return shifted[MEDIAN_WIDTH // 2]
