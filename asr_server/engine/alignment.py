"""Find when each token was said, from the attention of the decoder's alignment heads.

The method is openai/whisper's (timing.py): feed the text once more, normalise each head's attention over
the tokens, smooth it over time, and lay the tokens along the heads' mean by dynamic time warping. Beyond
it, every token has its own position, and an unread tail is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from asr_server.checkpoint.tokenizer import Timestamps, Tokenizer
from asr_server.core import POSITIONS_PER_S, SAMPLE_RATE, ChunkResult
from asr_server.engine.active_chunk import ActiveChunk
from asr_server.engine.cuda import HostCopy, Transfers
from asr_server.model import DecoderCache, Whisper
from asr_server.model.cache import Slots
from asr_server.model.rows import CacheRows, rows_of

Matrix = npt.NDArray[np.floating]
NAN: Final = "the model produced NaN on this audio; check the weights or try another --dtype"


def first_frames(gain: Matrix, share_frames: bool = False) -> npt.NDArray[np.intp]:
    """Return the frame at which each row begins on the path of the greatest sum.

    A row is a text token, a frame an encoder position. Each step goes to the next frame, in the same row
    or the next. Within a row the best way to each frame is a running minimum, so a row takes a few array
    operations.

    Args:
        gain: [rows, frames].
        share_frames: allow the next row in the same frame, as openai/whisper does.
            Needed if rows exceed frames.
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
        before = np.minimum(above[:-1], above[1:]) if share_frames else above[:-1]
        np.subtract(before, up_to[row, :-1], out=entered[row])
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
ALIGN_BATCH = 4  # chunks aligned together, a step: bounds the memory and the time that it takes
MEDIAN_WIDTH = 7
AROUND_PEAK = POSITIONS_PER_S // 2  # on both sides
# Words begin there: see benchmarks/results/word-times.md.
ONSET = 0.25
# Exchanges after which the middle one of seven values is their median (a pruned sorting network).
_EXCHANGES = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)  # fmt: skip
_TINY = torch.finfo(torch.float32).tiny


class Attended(NamedTuple):
    # [2, rows, positions]: what it is worth to lay a row at a position, and its attention. Summed over heads,
    # a row for each text token, a position for each 20 ms of the audio: 1.2 MB for 100 tokens in 30 s.
    sums: HostCopy
    logprobs: HostCopy | None  # of the tokens of a given text


@dataclass(frozen=True, eq=False)
class PendingAlignment:
    chunk: ActiveChunk
    result: ChunkResult
    num_tokens: int  # text tokens that are to have times
    sums: HostCopy
    logprobs: HostCopy | None

    def aligned_result(self) -> ChunkResult:
        gain, attention = self.sums.array()
        if not np.isfinite(gain).all():
            raise ValueError(NAN)
        first = first_frames(gain)
        onsets, focus = _within(attention, first)
        result = self.result
        if self.logprobs is not None:
            logprobs = self.logprobs.array()
            scores = {"logprobs": tuple(logprobs.tolist()), "avg_logprob": float(logprobs.mean())}
            result = msgspec.structs.replace(result, **scores)
        return msgspec.structs.replace(
            result,
            token_times_s=_of_length(first * SECONDS_PER_POSITION, self.num_tokens + 1),
            token_onsets_s=_of_length(onsets * SECONDS_PER_POSITION, self.num_tokens),
            token_focus=_of_length(focus, self.num_tokens),
            pauses_s=tuple((start_s, end_s) for start_s, end_s in self.chunk.pauses.tolist()),
        )


def _within(
    attention: Matrix, first: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """Return the onset of each row's attention, and the share of it that lies within the row's frames."""
    ends = np.maximum([*first[1:], attention.shape[1]], first + 1)
    spans = list(zip(attention, first.tolist(), ends.tolist(), strict=True))
    onsets = np.array([_onset(row, start + int(np.argmax(row[start:end]))) for row, start, end in spans])
    return onsets, np.array([row[start:end].sum() for row, start, end in spans])


def _onset(row: Matrix, peak: int) -> float:
    """Return the place, in frames, by which a share of the attention around the peak has come."""
    first = max(0, peak - AROUND_PEAK)
    before = np.concatenate([[0.0], row[first : peak + AROUND_PEAK + 1].cumsum()])
    return first + float(np.interp(before[-1] * ONSET, before, np.arange(len(before))))


def _of_length(times_s: npt.NDArray[np.floating], length: int) -> tuple[float, ...]:
    values = times_s[:length].tolist()
    return (*values, *values[-1:] * (length - len(values)))


class AlignedText(NamedTuple):
    """A text and the audio that it is laid along, as every rank gets them."""

    slot: int
    audio_slot: int
    tokens: list[int]  # the prompt, the text and its end
    first_row: int  # the position that predicts the first text token
    num_text: int  # text tokens, of which the last ones may have found no position
    num_positions: int  # of the encoder's output
    is_given: bool  # nobody has decoded it: its tokens' log-probabilities are wanted

    @property
    def num_rows(self) -> int:
        return min(self.num_text + 1, len(self.tokens) - self.first_row)


class Aligner:
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

    def start(self, texts: Sequence[AlignedText], slots: Slots) -> list[Attended]:
        sums = [
            torch.zeros(2, text.num_rows, text.num_positions, device=self._model.device) for text in texts
        ]
        heads = self._model.alignment_heads
        all_queries = self._model.decoder.audio_queries(*self._fed(slots, texts))
        for layer, queries in enumerate(islice(all_queries, max(heads) + 1)):
            if layer not in heads:
                continue
            for text, query, (gain, attention) in zip(texts, queries, sums, strict=True):
                keys = self._cache.audio_keys(layer, text.audio_slot, text.num_positions)
                self._add_layer(gain, attention, text, layer, query, keys)
        logprobs = [
            self._transfers.to_host(each) if len(each) else None for each in self._scored(slots, texts)
        ]
        return [
            Attended(self._transfers.to_host(self._model.shard.sum(each) / self._num_heads), scored)
            for each, scored in zip(sums, logprobs, strict=True)
        ]

    def _scored(self, slots: Slots, texts: Sequence[AlignedText]) -> list[Tensor]:
        """Return the log-probabilities of given texts' tokens; empty for others."""
        scored = [torch.empty(0)] * len(texts)
        if any(text.is_given for text in texts):
            tokens, positions, rows = self._fed(slots, texts)
            hidden = self._model.decoder(tokens, positions, rows)
            for number, text in enumerate(texts):
                if text.is_given:
                    before = slice(text.first_row, text.first_row + text.num_text)
                    said = tokens[number, text.first_row + 1 :][: text.num_text, None]
                    scores = self._model.decoder.logits(hidden[number, before])
                    scored[number] = scores.log_softmax(-1).gather(1, said)[:, 0]
        return scored

    def text_of(self, chunk: ActiveChunk, result: ChunkResult) -> AlignedText:
        specials, duration_s = self._tokenizer.specials, len(chunk.samples) / SAMPLE_RATE
        prompt = [*specials.sot_sequence(chunk.options, chunk.language), specials.no_timestamps]
        num_read, tail_s = Timestamps(self._tokenizer, duration_s).tail(result, chunk.options)
        text = [token for token in result.tokens[:num_read] if self._tokenizer.is_text(token)]
        tokens = [*prompt, *text, specials.end_of_text][: self._model.sizes.text_positions]
        num_samples = len(chunk.samples) if tail_s is None else round(tail_s * SAMPLE_RATE)
        window = self._model.sizes.window
        num_positions = min(max(1, num_samples // SAMPLES_PER_POSITION), window.num_positions)
        rows = len(prompt) - 1, len(text), num_positions
        is_given = bool(chunk.options.given_tokens)
        return AlignedText(chunk.slot, chunk.audio_slot, tokens, *rows, is_given)

    def _fed(self, slots: Slots, texts: Sequence[AlignedText]) -> tuple[Tensor, Tensor, CacheRows]:
        """Return what the decoder takes to read these texts at once."""
        device, end_of_text = self._model.device, self._tokenizer.specials.end_of_text
        longest = max(len(text.tokens) for text in texts)
        padded = [text.tokens + [end_of_text] * (longest - len(text.tokens)) for text in texts]
        tokens = self._transfers.to_device(torch.tensor(padded))
        positions = torch.arange(longest, device=device).expand_as(tokens)
        rows = rows_of(self._cache, slots, positions, context=longest)
        self._cache.text_ends.extend([text.slot for text in texts], longest)
        return tokens, positions, rows

    def _add_layer(
        self, gain: Tensor, attention: Tensor, text: AlignedText, layer: int, query: Tensor, keys: Tensor
    ) -> None:
        """Add a layer's heads to `gain` and `attention`: query [T, H, d], keys [H, d, positions]."""
        rows = slice(text.first_row, text.first_row + text.num_rows)
        for chosen in self._heads[layer]:
            scores = query[: len(text.tokens), chosen].transpose(0, 1).float() @ keys[chosen].float()
            weights = scores.softmax(-1)
            attention += weights[:, rows].sum(0)
            gain += smooth(normalise(weights)[:, rows]).sum(0)


def normalise(attention: Tensor) -> Tensor:
    """Return each token's attention [H, T, positions] above the mean of all tokens."""
    std, mean = torch.std_mean(attention, dim=1, keepdim=True, correction=0)
    return (attention - mean) / std.clamp_(min=_TINY)


def smooth(x: Tensor) -> Tensor:
    """Return medians of 7 neighbours [..., N], mirrored at the ends; ten times as fast as sorting."""
    length = x.shape[-1]
    if length <= MEDIAN_WIDTH // 2:
        return x
    padded = F.pad(x, (MEDIAN_WIDTH // 2, MEDIAN_WIDTH // 2), mode="reflect")
    shifted = [padded[..., i : i + length] for i in range(MEDIAN_WIDTH)]
    for low, high in _EXCHANGES:
        a, b = shifted[low], shifted[high]
        shifted[low], shifted[high] = torch.minimum(a, b), torch.maximum(a, b)
    return shifted[MEDIAN_WIDTH // 2]
