"""What the device knows of each slot: one row a sequence, so that a step is a few operations on columns."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from asr_server.core import DecodingOptions


@dataclass
class SlotState:
    """Columns over slots; a slice of them is a `SlotState` that shares its memory."""

    token: Tensor  # the last token, whose successor the next step computes
    position: Tensor  # of that token
    previous: Tensor  # the token before it
    num_generated: Tensor  # tokens after the prompt
    last_time: Tensor  # the last timestamp token; one before the first, where there is none yet
    no_speech: Tensor  # how likely the chunk is silence
    timestamps: Tensor  # bool: decode with timestamps
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    uniforms: Tensor  # [slots, positions]: the random number each draw will use
    generated: Tensor  # [slots, positions]: the tokens after the prompt

    @classmethod
    def empty(cls, num_slots: int, num_positions: int, device: torch.device) -> SlotState:
        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        integers = {name: column(torch.long) for name in ("token", "position", "previous", "num_generated")}
        settings = {field: column(torch.float) for field in _SETTINGS}
        return cls(
            **integers,
            **settings,
            last_time=column(torch.long),
            no_speech=column(torch.float),
            timestamps=column(torch.bool),
            top_k=column(torch.long),
            uniforms=column(torch.float, num_positions),
            generated=column(torch.long, num_positions),
        )

    def __getitem__(self, slots: slice | Tensor) -> SlotState:
        return SlotState(**{field.name: getattr(self, field.name)[slots] for field in fields(self)})

    def move(self, source: int, target: int) -> None:
        for field in fields(self):
            column = getattr(self, field.name)
            column[target] = column[source]

    def begin(self, slot: int, prompt: list[int], before_first_time: int) -> None:
        """Sets a slot to the last token of its prompt, with nothing generated yet."""
        self.token[slot] = prompt[-1]
        self.previous[slot] = prompt[-1]
        self.position[slot] = len(prompt) - 1
        self.num_generated[slot] = 0
        self.last_time[slot] = before_first_time

    def set_options(self, slot: int, options: DecodingOptions, temperature: float) -> None:
        self.temperature[slot] = temperature
        self.timestamps[slot] = options.timestamps
        for name in (
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            getattr(self, name)[slot] = getattr(options, name)

    def advance(self, tokens: Tensor, first_time: int) -> None:
        """Appends one token [B] to every row."""
        last_position = self.generated.shape[1] - 1
        self.generated.scatter_(1, self.num_generated.clamp(max=last_position)[:, None], tokens[:, None])
        self.previous.copy_(self.token)
        self.token.copy_(tokens)
        self.last_time.copy_(torch.where(tokens >= first_time, tokens, self.last_time))
        self.num_generated += 1
        self.position.add_(1).clamp_(
            max=last_position
        )  # a slot that is held may run on; it must not run over


_SETTINGS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
