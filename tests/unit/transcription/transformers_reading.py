"""Chunks as transformers reads them: its tokens, and its own rule of where to go on."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch

from asr_server.checkpoint.tokenizer import MIN_TAIL_S, Tokenizer
from asr_server.core import SAMPLE_RATE, Chunk, Samples
from asr_server.transcription.reading import MAX_READINGS
from asr_server.transcription.segments import FRAMES_PER_S
from harness.engine_helpers import Reference

PROMPT_TOKENS: Final = 3
AT_ONCE: Final = 16

Parts = dict[int, tuple[int, ...]]  # where the audio begins that was read, as `seek`: the tokens kept of it


class _Unread(NamedTuple):
    start: int  # sample of the recording
    samples: Samples


def read_chunks(reference: Reference, tokenizer: Tokenizer, chunks: Sequence[Chunk], language: str) -> Parts:
    """Each chunk alone, then the tails that are left unread."""
    parts: Parts = {}
    unread = [_Unread(chunk.start_sample, chunk.samples) for chunk in chunks]
    for part in range(MAX_READINGS):
        tails: list[_Unread] = []
        for each, tokens in _read(unread, reference, language):
            closed, offset_s = _retrieve(reference, tokens, len(each.samples), tokenizer)
            rest = each.samples[round(offset_s * SAMPLE_RATE) :]
            is_read = len(rest) < MIN_TAIL_S * SAMPLE_RATE or part == MAX_READINGS - 1
            kept = tokens if is_read else closed
            if len(kept) > 1 and min(kept[-2:]) >= tokenizer.specials.timestamp_begin:
                kept = kept[:-1]  # it opens a segment without text
            parts[round(each.start / SAMPLE_RATE * FRAMES_PER_S)] = kept
            if not is_read:
                tails.append(_Unread(each.start + len(each.samples) - len(rest), rest))
        unread = tails
    return parts


def _read(
    unread: Sequence[_Unread], reference: Reference, language: str
) -> Iterator[tuple[_Unread, tuple[int, ...]]]:
    max_new_tokens = reference.model.config.max_target_positions - PROMPT_TOKENS
    for first in range(0, len(unread), AT_ONCE):
        some = unread[first : first + AT_ONCE]
        clips = [each.samples for each in some]
        yield from zip(some, reference.transcribe(clips, language, max_new_tokens), strict=True)


def _retrieve(
    reference: Reference, tokens: tuple[int, ...], num_samples: int, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], float]:
    """transformers' own reading of the timestamps: the tokens of closed segments, and where to go on, in
    seconds.
    """
    num_frames = num_samples * FRAMES_PER_S // SAMPLE_RATE
    segments, offset = reference.model._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[None],
        time_offset=[0.0],
        timestamp_begin=tokenizer.specials.timestamp_begin,
        seek_num_frames=[num_frames],
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 0),
    )
    closed = tuple(token for segment in segments for token in segment["tokens"].tolist())
    return closed, offset / FRAMES_PER_S
