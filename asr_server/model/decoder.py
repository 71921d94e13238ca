"""Whisper's decoder: tokens and the audio's keys and values to scores. Shapes as in `whisper.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.model.attention import split_heads
from asr_server.model.blocks import (
    SELF_ATTENTION,
    FeedForward,
    Weights,
    Within,
    load_packed,
    load_summed,
    load_weights,
    query_scale,
)
from asr_server.model.cache_rows import CacheRows, LayerView
from asr_server.model.linear import Linear, can_pack, multiply, pack, packed_linear
from asr_server.model.shard import Shard
from asr_server.model.sizes import WhisperSizes

_VOCABULARY_ALIGNMENT = 128


class Decoder(nn.Module):
    def __init__(self, sizes: WhisperSizes, shard: Shard) -> None:
        super().__init__()
        self.scale = sizes.width**0.5 if sizes.scale_embedding else 1.0
        self.vocabulary = sizes.vocabulary
        # On a GPU with rows of zeros behind it, whose scores are cut off.
        num_rows = padded_vocabulary(sizes.vocabulary, torch.get_default_device())
        self.embedding = nn.Parameter(torch.zeros(num_rows, sizes.width))
        self.positions = nn.Parameter(torch.empty(sizes.text_positions, sizes.width))
        self.layers = nn.ModuleList(DecoderLayer(sizes, shard) for _ in range(sizes.decoder_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self._packed_embedding: Tensor | None = None

    def forward(self, tokens: Tensor, positions: Tensor, rows: CacheRows) -> Tensor:
        """Hidden states of the next tokens.

        Args:
            tokens, positions: [B, T], T consecutive positions of each sequence.
            rows: the B slots of the cache that these sequences hold.
        Returns:
            [B, T, D]; `logits` turns them into scores.
        """
        x = self._embed(tokens, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, rows.layer(i))
        normed: Tensor = self.norm(x)
        return normed

    def audio_queries(self, tokens: Tensor, positions: Tensor, rows: CacheRows) -> Iterator[Tensor]:
        """Each layer's queries over the audio, [B, T, H, d]; a layer is computed when it is asked for."""
        x = self._embed(tokens, positions)
        for i, layer in enumerate(self.layers):
            view = rows.layer(i)
            x = layer.attend_text(x, view)  # type: ignore[operator]
            query = layer.audio_query(x)  # type: ignore[operator]
            yield query
            x = layer.attend_audio(x, query, view)  # type: ignore[operator]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding) * self.scale + F.embedding(positions, self.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to float32 [..., vocabulary]; the embedding is the output projection too."""
        if self._packed_embedding is not None:
            scores = packed_linear(hidden, self._packed_embedding, None).float()
        elif hidden.is_cuda and hidden.dtype != torch.float32:
            # Straight to float32: rounded to bfloat16, likely tokens would tie.
            rows = hidden.flatten(0, -2)
            scores = torch.mm(rows, self.embedding.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
        else:
            scores = F.linear(hidden, self.embedding).float()
        return scores.narrow(-1, 0, self.vocabulary)

    def cross_keys_values(self, audio: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer, from the encoder's [B, F, D]: keys [B, D, F] and values [B, F, D].

        A layer is computed when it is asked for: for 8 chunks all 32 of large-v3 would be 2 GB.
        """
        for layer in self.layers:
            yield layer.keys_of(audio), layer.cross_value(audio)  # type: ignore[operator]

    def load(self, weights: Weights) -> None:
        self.embedding[: self.vocabulary].copy_(weights["embed_tokens.weight"])
        self._packed_embedding = pack(self.embedding) if can_pack(self.embedding) else None
        self.positions.copy_(weights["embed_positions.weight"])
        for i, layer in enumerate(self.layers):
            layer.load(Within(weights, f"layers.{i}."))  # type: ignore[operator]
        load_weights(self.norm, weights, "layer_norm")


def padded_vocabulary(vocabulary: int, device: torch.device) -> int:
    """Rows of the output projection: on a GPU, so many that a row of scores begins at a multiple of 512."""
    alignment = _VOCABULARY_ALIGNMENT if device.type == "cuda" else 1
    return -(-vocabulary // alignment) * alignment


class DecoderLayer(nn.Module):
    def __init__(self, sizes: WhisperSizes, shard: Shard) -> None:
        super().__init__()
        share = sizes.width // shard.count
        self.shard = shard
        self.num_heads = sizes.decoder_heads // shard.count
        self.norm = nn.LayerNorm(sizes.width)
        self.qkv = Linear(sizes.width, 3 * share)
        self.out = Linear(share, sizes.width)
        self.cross_norm = nn.LayerNorm(sizes.width)
        self.cross_query = Linear(sizes.width, share)
        self.cross_key = nn.Parameter(torch.empty(share, sizes.width))
        self.cross_value = Linear(sizes.width, share)
        self.cross_out = Linear(share, sizes.width)
        self.feed_forward = FeedForward(sizes.width, sizes.decoder_hidden, shard)

    def forward(self, x: Tensor, cache: LayerView) -> Tensor:
        """[B, T, D] to the same; writes this call's keys and values into the cache."""
        x = self.attend_text(x, cache)
        return self.attend_audio(x, self.audio_query(x), cache)

    def attend_text(self, x: Tensor, cache: LayerView) -> Tensor:
        query, key, value = split_heads(self.qkv(self.norm(x)), 3 * self.num_heads).chunk(3, dim=2)
        attended: Tensor = x + self.shard.sum(self.out(cache.attend_text(query, key, value)))
        return attended

    def audio_query(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, H, d]."""
        return split_heads(self.cross_query(self.cross_norm(x)), self.num_heads)

    def attend_audio(self, x: Tensor, query: Tensor, cache: LayerView) -> Tensor:
        y: Tensor = self.feed_forward(x + self.shard.sum(self.cross_out(cache.attend_audio(query))))
        return y

    def keys_of(self, audio: Tensor) -> Tensor:
        """Cross-attention keys of the encoder's [B, F, D], transposed: [B, H d, F]. They have no bias."""
        if audio.is_cuda:
            return self.cross_key @ audio.transpose(1, 2)
        return torch.stack([multiply(self.cross_key, each) for each in audio])

    def load(self, weights: Weights) -> None:
        shard, scale = self.shard, query_scale(self.qkv, self.num_heads)
        load_weights(self.norm, weights, "self_attn_layer_norm")
        load_packed(self.qkv, weights, SELF_ATTENTION, shard, scale)
        load_summed(self.out, weights, "self_attn.out_proj", shard)
        load_weights(self.cross_norm, weights, "encoder_attn_layer_norm")
        load_packed(self.cross_query, weights, ("encoder_attn.q_proj",), shard, scale)
        self.cross_key.copy_(shard.outputs(weights["encoder_attn.k_proj.weight"]))
        load_packed(self.cross_value, weights, ("encoder_attn.v_proj",), shard)
        load_summed(self.cross_out, weights, "encoder_attn.out_proj", shard)
        self.feed_forward.load(weights)
