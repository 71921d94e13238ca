"""Whisper (Radford et al. 2022, https://arxiv.org/abs/2212.04356) for inference: encoder and decoder.

Made by `weights.py`, called by `engine`.

Shapes: B sequences, T positions of a call, F audio positions (at most 1500), D width, H heads, d = D / H.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asr_server.checkpoint.sizes import WhisperSizes, upper_half
from asr_server.checkpoint.tensors import EMBEDDING
from asr_server.model.cache import DecoderCache
from asr_server.model.features import LogMel
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import (
    WHOLE,
    Behind,
    Shard,
    Silence,
    SilentLayer,
    Weights,
    attend_audio,
    load_packed,
    load_summed,
    load_weights,
    query_scale,
    split_heads,
)
from asr_server.model.products import Int8Linear, Linear, PackedWeight, is_one_row, multiply, pack
from asr_server.model.rows import CacheRows

_FLOAT16_LIMIT = torch.finfo(torch.float16).max - 1000


class Encoder(nn.Module):
    def __init__(self, sizes: WhisperSizes, shard: Shard, linear: type[Linear] = Linear) -> None:
        super().__init__()
        self.conv1 = Convolution(sizes.num_mels, sizes.width, stride=1)
        self.conv2 = Convolution(sizes.width, sizes.width, stride=2)
        self.positions = nn.Parameter(torch.empty(sizes.audio_positions, sizes.width))
        self.layers = nn.ModuleList(EncoderLayer(sizes, shard, linear) for _ in range(sizes.encoder_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.progress = [0]  # layers computed

    def forward(self, mel: Tensor, kernels: Kernels = TORCH, silence: Silence | None = None) -> Tensor:
        """Encode [B, num_mels, 2 F] to [B, F, D]; `silence` fills the rest of the window."""
        length = mel.shape[-1] // 2
        behind = silence.layers if silence and length < len(self.positions) else ()
        if behind:  # the convolutions look past the end, where the last frame goes on
            mel = F.pad(mel, (0, 2), mode="replicate")
        x = mel.to(self.positions.dtype).transpose(1, 2)
        x = self.conv2(self.conv1(x, kernels), kernels)[:, :length].contiguous()  # a kernel may read it
        change = self.positions[:length]
        for layer, silent in zip_longest(self.layers, behind):
            x, change = layer(x, change, kernels, silent and silent.behind(length))
            self.progress[0] += 1
        return add_norm(x, change, self.norm, kernels)[1]

    def load(self, weights: Weights) -> None:
        self.conv1.load(weights, "encoder.conv1")
        self.conv2.load(weights, "encoder.conv2")
        self.positions.copy_(weights["encoder.embed_positions.weight"])
        for i, layer in enumerate(self.layers):
            layer.load(weights, f"encoder.layers.{i}")  # type: ignore[operator]
        load_weights(self.norm, weights, "encoder.layer_norm")


class Layer(nn.Module):
    """Self-attention and feed-forward, in layers of encoder and decoder alike."""

    def __init__(self, width: int, num_heads: int, hidden: int, shard: Shard, linear: type[Linear]) -> None:
        super().__init__()
        share = width // shard.count
        self.shard = shard
        self.num_heads = num_heads // shard.count
        self.norm = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * share)
        self.out = linear(share, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = linear(width, hidden // shard.count, gelu=True)
        self.down = linear(hidden // shard.count, width)

    def load(self, weights: Weights, name: str) -> None:
        attention = f"{name}.self_attn"
        load_weights(self.norm, weights, f"{attention}_layer_norm")
        parts, scale = [f"{attention}.{part}_proj" for part in "qkv"], query_scale(self.qkv, self.num_heads)
        load_packed(self.qkv, weights, parts, self.shard, scale)
        load_summed(self.out, weights, f"{attention}.out_proj", self.shard)
        load_weights(self.feed_forward_norm, weights, f"{name}.final_layer_norm")
        load_packed(self.up, weights, [f"{name}.fc1"], self.shard)
        load_summed(self.down, weights, f"{name}.fc2", self.shard)


class EncoderLayer(Layer):
    def __init__(self, sizes: WhisperSizes, shard: Shard, linear: type[Linear]) -> None:
        super().__init__(sizes.width, sizes.encoder_heads, sizes.encoder_hidden, shard, linear)

    def forward(
        self, x: Tensor, change: Tensor, kernels: Kernels, behind: Behind | None
    ) -> tuple[Tensor, Tensor]:
        """Take x [B, F, D] and a change to add to it, which fuses with the next norm; return the next two."""
        x, normed = add_norm(x, change, self.norm, kernels)
        attended = attend_audio(self.qkv(normed, kernels), self.num_heads, behind)
        x, normed = add_norm(x, self.shard.sum(self.out(attended, kernels)), self.feed_forward_norm, kernels)
        return x, self.shard.sum(self.down(self.up(normed, kernels), kernels))


def _limit(x: Tensor) -> float | None:
    # Large checkpoints leave float16's range; transformers clamps each layer's output in the same way.
    return _FLOAT16_LIMIT if x.dtype == torch.float16 else None


def add_norm(x: Tensor, change: Tensor, norm: nn.LayerNorm, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Return x + change and its norm, [B, F, D] each; `change` may be [F, D]."""
    limit = _limit(x)
    if kernels.add_norm is not None:
        return kernels.add_norm(x, change, norm.weight, norm.bias, norm.eps, limit)
    x = x + change
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x, norm(x)


def norm_product(
    x: Tensor, change: Tensor, norm: nn.LayerNorm, linear: Linear, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Return x + change, and the product of its norm."""
    if kernels.norm_product is not None and is_one_row(x) and linear.packed is None:
        of_norm = norm.weight, norm.bias, norm.eps, _limit(x)
        return kernels.norm_product(x, change, *of_norm, linear.weight, linear.bias, linear.gelu)
    x, normed = add_norm(x, change, norm, kernels)
    return x, linear(normed, kernels)


class Convolution(Linear):
    """A convolution of width 3 with GELU, as one product: [B, N, C] to [B, N / stride, D]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__(3 * channels, width, gelu=True)
        self.stride = stride

    def forward(self, x: Tensor, kernels: Kernels = TORCH) -> Tensor:
        padded = F.pad(x, (0, 0, 1, 1))
        windows = padded.unfold(1, 3, self.stride).transpose(2, 3)  # [B, N / stride, 3, C]
        return super().forward(windows.flatten(2), kernels)

    def load(self, weights: Weights, name: str) -> None:
        self.weight.copy_(weights[f"{name}.weight"].transpose(1, 2).flatten(1))  # [D, C, 3] to [D, 3 C]
        self.bias.copy_(weights[f"{name}.bias"])


_VOCABULARY_ALIGNMENT = 128
_TO_FLOAT32 = {"out_dtype": torch.float32}
_ROW_UNIT = 8  # numbers of 16 bits that are 16 bytes


class Decoder(nn.Module):
    def __init__(
        self, sizes: WhisperSizes, shard: Shard, linear: type[Linear] = Linear, int8_scores: bool = False
    ) -> None:
        super().__init__()
        self.scale = sizes.width**0.5 if sizes.scale_embedding else 1.0
        self.vocabulary = sizes.vocabulary
        # On a GPU with rows of zeros behind it, whose scores are cut off.
        num_rows = padded_vocabulary(sizes.vocabulary, torch.get_default_device())
        self.embedding = nn.Parameter(torch.zeros(num_rows, sizes.width))
        self.positions = nn.Parameter(torch.empty(sizes.text_positions, sizes.width))
        self.layers = nn.ModuleList(
            DecoderLayer(i, sizes, shard, linear) for i in range(sizes.decoder_layers)
        )
        self.norm = nn.LayerNorm(sizes.width)
        self._int8_scores = Int8Linear(sizes.width, sizes.vocabulary) if int8_scores else None
        self._packed_embedding: PackedWeight | None = None
        self.progress = [0]  # layers computed

    def forward(self, tokens: Tensor, positions: Tensor, rows: CacheRows) -> Tensor:
        """Return hidden states [B, T, D] of the next tokens.

        Args:
            tokens, positions: [B, T], consecutive positions.
            rows: the cache slots of these sequences.
        """
        x, change = self._embed(tokens, positions)
        for layer in self.layers:
            x, change = layer(x, change, rows)
            self.progress[0] += 1
        return add_norm(x, change, self.norm, rows.kernels)[1]

    def audio_queries(self, tokens: Tensor, positions: Tensor, rows: CacheRows) -> Iterator[Tensor]:
        """Yield each layer's audio queries, [B, T, H, d], on demand."""
        x, change = self._embed(tokens, positions)
        for layer in self.layers:
            x, query = layer.attend_text(x, change, rows)  # type: ignore[operator]
            self.progress[0] += 1
            yield query
            x, change = layer.attend_audio(x, query, rows)  # type: ignore[operator]

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(tokens, self.embedding).to(self.positions.dtype)
        scaled = embedded if self.scale == 1.0 else embedded * self.scale
        return scaled, F.embedding(positions, self.positions)

    def new_scores(self, num_rows: int) -> Tensor | None:
        """Allocate a GPU's output for `logits`, [rows, padded vocabulary]; None on CPU."""
        if not self.embedding.is_cuda:
            return None
        return torch.empty(num_rows, len(self.embedding), device=self.embedding.device)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Project [..., D] to float32 [..., vocabulary], by the embedding.

        With `out`, rows of `new_scores`, the result is a view of them.
        """
        if self._int8_scores is not None:
            scores: Tensor = self._int8_scores(hidden.float())
        elif self._packed_embedding is not None:
            scores = self._packed_embedding.product(hidden).float()
        elif hidden.is_cuda:
            # Straight to float32: rounded to bfloat16, likely tokens would tie.
            rows, to_float32 = hidden.flatten(0, -2), {} if hidden.dtype == torch.float32 else _TO_FLOAT32
            scores = torch.mm(rows, self.embedding.t(), **to_float32, out=out).view(*hidden.shape[:-1], -1)
        else:
            scores = F.linear(hidden, self.embedding).float()
        return scores.narrow(-1, 0, self.vocabulary)

    def cross_keys_values(self, audio: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each layer's keys [B, D, F] and values [B, F, D] from [B, F, D].

        On demand: for 11 chunks, large-v3's 32 layers would take 2.7 GB.
        """
        for layer in self.layers:
            yield layer.keys_of(audio), layer.cross_value(audio)  # type: ignore[operator]

    def load(self, weights: Weights) -> None:
        self.embedding[: self.vocabulary].copy_(weights[EMBEDDING])
        load_weights(self.norm, weights, "decoder.layer_norm")
        if self._int8_scores is not None:
            self._load_int8_scores(self._int8_scores, weights)
        else:
            self._packed_embedding = pack(self.embedding)
        if self._int8_scores is not None or self._packed_embedding is not None:
            self.embedding = nn.Parameter(_halved(self.embedding))  # rows are looked up in this one
        self.positions.copy_(weights["decoder.embed_positions.weight"])
        for i, layer in enumerate(self.layers):
            layer.load(weights, f"decoder.layers.{i}")  # type: ignore[operator]

    def _load_int8_scores(self, scores: Int8Linear, weights: Weights) -> None:
        """Fold the norm's weights and biases into the output projection.

        The norm has a few large outputs, which would cost the others their bits. Scores would be four
        times as far off. The mean over tokens, the same for each score, is left out.
        """
        embedding = weights[EMBEDDING].float()  # not rounded to bfloat16 first
        centred = embedding - embedding.mean(0)
        scores.bias = nn.Parameter(centred @ weights["decoder.layer_norm.bias"].float())
        scores.weight = nn.Parameter(centred.mul_(weights["decoder.layer_norm.weight"].float()))
        self.norm.weight.fill_(1)
        self.norm.bias.fill_(0)


def _halved(matrix: Tensor) -> Tensor:
    """Return the matrix in float16 where that is exact, as in OpenAI's weights."""
    half = matrix.to(torch.float16)
    return half if matrix.dtype == torch.float32 and torch.equal(half.float(), matrix) else matrix


def padded_vocabulary(vocabulary: int, device: torch.device) -> int:
    """Return the projection's rows; on a GPU, score rows are aligned to 512."""
    alignment = _VOCABULARY_ALIGNMENT if device.type == "cuda" else 1
    return -(-vocabulary // alignment) * alignment


class DecoderLayer(Layer):
    def __init__(self, index: int, sizes: WhisperSizes, shard: Shard, linear: type[Linear]) -> None:
        super().__init__(sizes.width, sizes.decoder_heads, sizes.decoder_hidden, shard, linear)
        share = sizes.width // shard.count
        self.index = index
        self.cross_norm = nn.LayerNorm(sizes.width)
        self.cross_query = linear(sizes.width, share)
        self.cross_key = nn.Parameter(torch.empty(share, sizes.width))
        self.cross_value = linear(sizes.width, share)
        self.cross_out = linear(share, sizes.width)

    def forward(self, x: Tensor, change: Tensor, rows: CacheRows) -> tuple[Tensor, Tensor]:
        """Take x [B, T, D] and a change, as an encoder layer does. Writes the cache."""
        return self.attend_audio(*self.attend_text(x, change, rows), rows)

    def attend_text(self, x: Tensor, change: Tensor, rows: CacheRows) -> tuple[Tensor, Tensor]:
        """Return [B, T, D] and the audio queries, [B, T, H, d]."""
        x, qkv = norm_product(x, change, self.norm, self.qkv, rows.kernels)
        query, key, value = split_heads(qkv, 3 * self.num_heads).chunk(3, dim=2)
        attended = rows.attend_text(self.index, query, key, value)
        change = self.shard.sum(self.out(attended, rows.kernels))
        x, query = norm_product(x, change, self.cross_norm, self.cross_query, rows.kernels)
        return x, split_heads(query, self.num_heads)

    def attend_audio(self, x: Tensor, query: Tensor, rows: CacheRows) -> tuple[Tensor, Tensor]:
        change = self.shard.sum(self.cross_out(rows.attend_audio(self.index, query), rows.kernels))
        x, hidden = norm_product(x, change, self.feed_forward_norm, self.up, rows.kernels)
        return x, self.shard.sum(self.down(hidden, rows.kernels))

    def keys_of(self, audio: Tensor) -> Tensor:
        """Return transposed audio keys of [B, F, D], [B, H d, F]. They have no bias."""
        if audio.is_cuda:
            # Rows that begin at multiples of 16 bytes: else the product takes four times as long.
            length = audio.shape[1]
            keys = audio.new_empty(len(audio), len(self.cross_key), -(-length // _ROW_UNIT) * _ROW_UNIT)
            weight = self.cross_key.expand(len(audio), -1, -1)
            return torch.bmm(weight, audio.transpose(1, 2), out=keys[..., :length])
        return torch.stack([multiply(self.cross_key, each) for each in audio])

    def load(self, weights: Weights, name: str) -> None:
        super().load(weights, name)
        shard, cross = self.shard, f"{name}.encoder_attn"
        load_weights(self.cross_norm, weights, f"{cross}_layer_norm")
        load_packed(
            self.cross_query, weights, [f"{cross}.q_proj"], shard, query_scale(self.qkv, self.num_heads)
        )
        self.cross_key.copy_(shard.outputs(weights[f"{cross}.k_proj.weight"]))
        load_packed(self.cross_value, weights, [f"{cross}.v_proj"], shard)
        load_summed(self.cross_out, weights, f"{cross}.out_proj", shard)


class Whisper(nn.Module):
    def __init__(
        self,
        sizes: WhisperSizes,
        device: torch.device,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        encoder_linear: type[Linear] = Linear,
        decoder_linear: type[Linear] = Linear,
        int8: bool = False,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.shard = shard
        self.device = device
        self.dtype = dtype
        self.int8 = int8
        self.alignment_heads = upper_half(sizes)
        with torch.device(device):
            zeros = sizes.window.padding == "zeros"
            self.log_mel = LogMel(sizes.num_mels, sizes.num_frames, zeros).to(device)
            with _default_dtype(dtype):  # never in float32 first, which would take twice the memory
                self.encoder = Encoder(sizes, shard, encoder_linear)
                self.decoder = Decoder(sizes, shard, decoder_linear, int8)

    def new_cache(
        self,
        num_slots: int,
        kernels: Kernels = TORCH,
        int8_audio: bool = False,
        num_text_slots: int | None = None,
    ) -> DecoderCache:
        ranks, device, dtype = self.shard.count, self.device, self.dtype
        return DecoderCache(self.sizes, num_slots, device, dtype, ranks, kernels, int8_audio, num_text_slots)

    @torch.inference_mode()
    def encode_silence(self, kernels: Kernels = TORCH) -> Silence:
        """Encode a silent window; keep what its layers attend to."""
        kept: list[SilentLayer] = []

        def keep(layer: nn.Module, inputs: object, qkv: Tensor) -> None:
            kept.append(SilentLayer.of(qkv[0], self.sizes.encoder_heads // self.shard.count))

        hooks = [layer.qkv.register_forward_hook(keep) for layer in self.encoder.layers]  # type: ignore[union-attr]
        audio: Tensor = self.encoder(self.log_mel([np.empty(0, np.float32)]), kernels)
        for hook in hooks:
            hook.remove()
        return Silence(tuple(kept), audio)

    def load_hugging_face(self, weights: Weights) -> None:
        """Load weights of a checked layout, by Hugging Face names without `model.`."""
        with torch.no_grad():
            self.encoder.load(weights)
            self.decoder.load(weights)
            for module in self.modules():
                if isinstance(module, Linear):
                    module.pack()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
