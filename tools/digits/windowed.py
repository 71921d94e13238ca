"""A model heard without a server: a batch of windows at once, greedily, in a tenth of the time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .clips import SAMPLE_RATE, Wave
from .examination import Heard
from .features import LogMel
from .network import WINDOW_S, encode, load_network
from .vocabulary import TIMESTAMP_STEP_S, Vocabulary
from .windows import Said

_MAX_TOKENS = 60
_BATCH = 32


class WindowListener:
    """The weights of a model folder on windows of 8 s; what is longer is cut off."""

    def __init__(self, folder: Path) -> None:
        self.words, self.log_mel = Vocabulary(), LogMel()
        self.network = load_network(self.words, folder)
        self.network.train(False)

    def hear(self, waves: list[Wave], with_times: bool, prompt: str = "") -> list[Heard]:
        """What is written for each wave."""
        batches = [waves[at : at + _BATCH] for at in range(0, len(waves), _BATCH)]
        return [heard for batch in batches for heard in self._batch(batch, with_times, prompt)]

    @torch.inference_mode()
    def _batch(self, waves: list[Wave], with_times: bool, prompt: str) -> list[Heard]:
        size = WINDOW_S * SAMPLE_RATE
        padded = np.stack([np.pad(wave[:size], (0, max(0, size - len(wave)))) for wave in waves])
        features = self.log_mel(torch.from_numpy(padded.astype(np.float32)))
        encoded = encode(self.network, features, torch.zeros(len(waves), dtype=torch.long))
        start = [self.words.prev, *self.words.encode_bytes(prompt)] if prompt else []
        start += [self.words.sot, self.words.english, self.words.transcribe]
        start += [] if with_times else [self.words.no_timestamps]
        return [self._read(row) for row in self._write(encoded, start)]

    def _write(self, encoded: torch.Tensor, start: list[int]) -> list[list[int]]:
        """Greedy tokens of each row, up to <|endoftext|>."""
        step, cache, columns = torch.tensor([start] * len(encoded)), None, list[torch.Tensor]()
        ended = torch.zeros(len(encoded), dtype=torch.bool)
        while len(columns) < _MAX_TOKENS and not ended.all():
            output = self.network.model.decoder(
                input_ids=step, encoder_hidden_states=encoded, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            step = self.network.proj_out(output.last_hidden_state[:, -1:]).argmax(dim=-1)
            ended |= step[:, 0] == self.words.eot
            columns.append(step[:, 0].masked_fill(ended, self.words.eot))
        rows: list[list[int]] = torch.stack(columns, dim=1).tolist()
        return rows

    def _read(self, tokens: list[int]) -> Heard:
        segments: list[Said] = []
        start_s, inside = None, list[int]()
        for token in tokens:
            if token < self.words.timestamp_begin:
                inside.append(token)
                continue
            time_s = (token - self.words.timestamp_begin) * TIMESTAMP_STEP_S
            if start_s is not None and inside:
                segments.append(Said(self.words.decode_digits(inside), start_s, time_s))
                start_s, inside = None, []
            else:
                start_s = time_s
        return Heard(self.words.decode_digits(tokens), segments)
