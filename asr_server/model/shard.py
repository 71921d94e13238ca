"""Which part of the model a rank holds, where several ranks work as one replica (tensor parallelism).

As in Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): attention is split by heads and the
feed-forward by its inner columns, so that each block needs one sum over the ranks, at its end. Norms, the
convolutions, positions and the vocabulary are whole on every rank: they are a few percent of the weights, and
with the whole vocabulary every rank comes to the same scores and the same token without asking another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed
from torch import Tensor

from asr_server.model.sizes import WhisperSizes


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `count`. Where there are several, torch.distributed's default group is those ranks."""

    rank: int = 0
    count: int = 1

    def check(self, sizes: WhisperSizes) -> None:
        """Raises ValueError where the model cannot be split so."""
        parts = {
            "encoder_attention_heads": sizes.encoder_heads,
            "decoder_attention_heads": sizes.decoder_heads,
            "encoder_ffn_dim": sizes.encoder_hidden,
            "decoder_ffn_dim": sizes.decoder_hidden,
        }
        for name, number in parts.items():
            if number % self.count:
                raise ValueError(
                    f"--tensor-parallel-size {self.count} does not divide the model's {name}, {number}"
                )

    def outputs(self, weight: Tensor) -> Tensor:
        """This rank's rows of a weight [outputs, inputs], or entries of a bias."""
        return weight.chunk(self.count)[self.rank]

    def inputs(self, weight: Tensor) -> Tensor:
        """This rank's columns of a weight [outputs, inputs], whose product is to be summed."""
        return weight.chunk(self.count, dim=1)[self.rank]

    def once(self, bias: Tensor) -> Tensor:
        """A bias of what is to be summed: added by one rank."""
        return bias if self.rank == 0 else bias.new_zeros(bias.shape)

    def heads(self, heads: list[int], num_heads: int) -> list[int]:
        """Those of these heads that this rank has, by their numbers here."""
        share = num_heads // self.count
        first = self.rank * share
        return [head - first for head in heads if first <= head < first + share]

    def sum(self, part: Tensor) -> Tensor:
        """Over all ranks, which get the same to the last bit. May overwrite `part`."""
        if self.count > 1:
            torch.distributed.all_reduce(part)
        return part


WHOLE = Shard()
