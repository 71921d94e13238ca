"""What training minimises: losses of the decoder, of the encoder, and of where the decoder looks."""

from __future__ import annotations

import torch
from torch import nn
from transformers import WhisperForConditionalGeneration

from .batches import IGNORED, Batch
from .features import LogMel, mask, warp
from .network import NUM_FRAME_LAYERS, decode, encode
from .vocabulary import NUM_TIMESTAMPS, Vocabulary

NUM_CLASSES = 11
"""Of both heads on the encoder: CTC's blank or no digit, and the ten digits."""

GUIDED_HEADS = (1, 2)
"""Of the decoder's last layer: they shall look where the next token is said."""
_TIMESTAMP_KERNEL = ((-2, 0.1), (-1, 0.2), (0, 0.4), (1, 0.2), (2, 0.1))


class Learner(nn.Module):
    """The network, and two heads on its encoder that help it to hear and are thrown away in the end."""

    def __init__(self, network: WhisperForConditionalGeneration, words: Vocabulary) -> None:
        super().__init__()
        self.network, self.words = network, words
        self.ctc_head = nn.Linear(network.config.d_model, NUM_CLASSES)
        self.frame_head = nn.Linear(network.config.d_model, NUM_CLASSES)
        nn.init.constant_(self.ctc_head.bias[:1], 4.0)  # it begins with blanks, where it would get first
        self.log_mel = LogMel()

    def forward(
        self, batch: Batch, frames_only: bool = False, spoiled: float = 1.0
    ) -> dict[str, torch.Tensor]:
        """The losses of one batch by name; ``frames_only``: that of the frames alone, by the first layers.

        ``spoiled`` is the chance of a batch to be stretched along the mel axis and masked.
        """
        features = self.log_mel(torch.from_numpy(batch.samples).float() / 32768)
        if torch.rand(()) < spoiled:
            features = mask(warp(features))
        if frames_only:
            encoded = encode(self.network, features, torch.from_numpy(batch.shift), NUM_FRAME_LAYERS)
            return {"frame": self._frame(encoded, batch)}
        encoded = encode(self.network, features, torch.from_numpy(batch.shift))
        hidden, attention = decode(
            self.network, encoded, torch.from_numpy(batch.tokens), torch.from_numpy(batch.places)
        )
        targets = torch.from_numpy(batch.targets)
        return {
            "ctc": self._ctc(encoded, batch),
            "frame": self._frame(encoded, batch),
            "look": look_loss(attention[:, GUIDED_HEADS], torch.from_numpy(batch.spans)),
            **self._next_token(hidden[targets >= 0], targets[targets >= 0]),
        }

    def _frame(self, encoded: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits, labels = self.frame_head(encoded).flatten(0, 1), torch.from_numpy(batch.frames).flatten()
        return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)

    def _ctc(self, encoded: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits = self.ctc_head(encoded)
        lengths = torch.full((len(logits),), logits.shape[1])
        spoken = torch.from_numpy(batch.ctc_lengths)
        log_p = logits.log_softmax(2).transpose(0, 1)
        losses = nn.functional.ctc_loss(
            log_p, torch.from_numpy(batch.ctc) + 1, lengths, spoken, reduction="none", zero_infinity=True
        )
        # Per digit, with every half second of the window counted as one: empty windows weigh like others.
        loss: torch.Tensor = (losses / (spoken + logits.shape[1] / 25)).mean()
        return loss

    def _next_token(self, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits, begin = self.network.proj_out(hidden), self.words.timestamp_begin
        is_time = targets >= begin
        text = nn.functional.cross_entropy(logits[~is_time], targets[~is_time])
        if not is_time.any():
            return {"text": text, "time": text.new_zeros(())}
        log_p, steps = logits[is_time].log_softmax(1), targets[is_time] - begin
        time_loss = torch.zeros(len(steps))
        for offset, weight in _TIMESTAMP_KERNEL:
            near = (steps + offset).clamp(0, NUM_TIMESTAMPS - 1) + begin
            time_loss = time_loss - weight * log_p.gather(1, near[:, None])[:, 0]
        return {"text": text, "time": time_loss.mean()}


def look_loss(attention: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """How little of the guided heads' attention lies where the next token is said.

    attention [rows, heads, tokens, positions], spans [rows, tokens, 2]; tokens without a span do not count.
    """
    places = torch.arange(attention.shape[-1])
    inside = (places >= spans[..., :1]) & (places < spans[..., 1:])  # [rows, tokens, positions]
    share = (attention * inside[:, None]).sum(dim=-1).transpose(1, 2)  # [rows, tokens, heads]
    guided = share[spans[..., 1] > spans[..., 0]]
    return -torch.log(guided + 1e-3).mean() if len(guided) else attention.new_zeros(())
