"""The network: transformers' Whisper modules, on windows of any length up to its own for training."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

from .vocabulary import NUM_TIMESTAMPS, Vocabulary

WINDOW_S = 8
"""Length of the sound that is encoded at once."""
MAX_POSITIONS = WINDOW_S * 50
MAX_TOKENS = 448
MAX_PROMPT_TOKENS = MAX_TOKENS // 2 - 1
NUM_ENCODER_LAYERS = 4
NUM_FRAME_LAYERS = 2
"""Encoder layers that learn first, alone: the others add nothing until then."""
HEAD_OFFSETS = ((-3, -1, 1, 3), (-12, -4, 4, 12), (-6, -2, 2, 6), (-24, -8, 8, 24))
"""How many positions away each attention head of each encoder layer looks at first."""


def make_config(words: Vocabulary) -> WhisperConfig:
    """The sizes of whisper-digits."""
    return WhisperConfig(
        vocab_size=words.size,
        num_mel_bins=80,
        d_model=128,
        encoder_layers=NUM_ENCODER_LAYERS,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=512,
        max_source_positions=MAX_POSITIONS,
        max_target_positions=MAX_TOKENS,
        decoder_start_token_id=words.sot,
        bos_token_id=words.eot,
        eos_token_id=words.eot,
        pad_token_id=words.eot,
        suppress_tokens=[],
        begin_suppress_tokens=[],
        dropout=0.0,
        use_cache=True,
    )


def sinusoids(length: int, channels: int) -> torch.Tensor:
    """Whisper's positions (openai/whisper, model.py); shape [length, channels]."""
    rates = torch.exp(-math.log(10_000) / (channels // 2 - 1) * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * rates[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def make_network(words: Vocabulary) -> WhisperForConditionalGeneration:
    """Whisper with fresh weights.

    Timestamp <|0.02 k|> begins as encoder position k (scaled to norm 1): attention that has found a
    moment then already carries nearly the embedding of its timestamp, and times are learned quickly.
    """
    network = WhisperForConditionalGeneration(make_config(words))
    _initialise(network)
    positions = sinusoids(NUM_TIMESTAMPS, network.config.d_model)
    with torch.no_grad():
        encoder = network.model.encoder
        encoder.embed_positions.weight.copy_(positions[:MAX_POSITIONS])
        _spectral_filters(encoder.conv1)
        for layer, offsets in zip(encoder.layers, HEAD_OFFSETS, strict=True):
            _look_nearby(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, offsets)
        for layer in encoder.layers[NUM_FRAME_LAYERS:]:
            layer.self_attn.out_proj.weight.zero_()
            layer.fc2.weight.zero_()
        embedding = network.model.decoder.embed_tokens.weight
        embedding[words.timestamp_begin :] = positions / math.sqrt(network.config.d_model / 2)
    return network


def _initialise(network: WhisperForConditionalGeneration) -> None:
    """Weights that keep the variance. With the library's 0.02 the sound would drown in the positions:

    after two convolutions it would have a deviation of 0.04 beside the sinusoids' 0.7.
    """
    depth = network.config.encoder_layers + network.config.decoder_layers
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv1d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.Linear) and name != "proj_out":
            nn.init.xavier_normal_(module.weight)
            if name.endswith(("out_proj", "fc2")):  # what is added to the residual stream, as in GPT-2
                module.weight.data /= math.sqrt(depth)
    nn.init.normal_(network.model.decoder.embed_tokens.weight, std=0.05)


def _spectral_filters(convolution: nn.Conv1d) -> None:
    """Filters that see the shape of a spectrum and how it changes, with outputs of about the same size.

    Each is a cosine over the mel bins, as cepstra have them. Random filters mostly see the level, which
    differs more than anything else and says nothing about the digit.
    """
    num_filters, num_bins, _ = convolution.weight.shape
    number = torch.arange(num_filters)
    ripples = number % 26
    bins = (torch.arange(num_bins) + 0.5) / num_bins
    shapes = torch.cos(math.pi * ripples[:, None] * bins[None, :])
    courses = torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 1.0], [-1.0, 2.0, -1.0]])[number % 3]
    # A spectrum varies less in its finer ripples: its mean over three frames as their number's inverse,
    # its differences as the inverse's square root.
    gains = torch.where(number % 3 == 0, (1 + ripples) / 80, (1 + ripples).sqrt() / 5)
    signs = torch.randint(0, 2, (num_filters,)) * 2.0 - 1
    convolution.weight.copy_((gains * signs)[:, None, None] * shapes[:, :, None] * courses[:, None, :])


def _look_nearby(query: torch.Tensor, key: torch.Tensor, offsets: tuple[int, ...]) -> None:
    """Let every head begin by looking a fixed number of positions away: the layer begins as a convolution.

    Key and query are the sinusoids of 16 frequencies, the query's turned by the offset: their
    product is largest where the key's position is the query's plus the offset.
    """
    width, half = query.shape[0], query.shape[1] // 2
    head_width = width // len(offsets)
    channels = torch.linspace(0, 30, head_width // 2).round().long()
    rates = torch.exp(-math.log(10_000) / (half - 1) * channels)
    query.mul_(0.3)
    key.mul_(0.3)
    for head, offset in enumerate(offsets):
        rows = head * head_width + 2 * torch.arange(head_width // 2)
        sine, cosine = torch.sin(rates * offset), torch.cos(rates * offset)
        key[rows, channels] += _NEARBY_GAIN
        key[rows + 1, half + channels] += _NEARBY_GAIN
        query[rows, channels] += _NEARBY_GAIN * cosine
        query[rows, half + channels] += _NEARBY_GAIN * sine
        query[rows + 1, half + channels] += _NEARBY_GAIN * cosine
        query[rows + 1, channels] -= _NEARBY_GAIN * sine


_NEARBY_GAIN = 1.7
"""Of query and key: most of a head's attention then lies within two positions of its offset."""


def encode(
    network: WhisperForConditionalGeneration,
    features: torch.Tensor,
    shift: torch.Tensor,
    num_layers: int | None = None,
) -> torch.Tensor:
    """The encoder on windows that begin at position ``shift`` [rows] of the table and may be shorter.

    features [rows, 80, frames] to [rows, frames / 2, width].
    """
    encoder = network.model.encoder
    network.config._attn_implementation = "sdpa"
    hidden = nn.functional.gelu(encoder.conv1(features))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    places = shift[:, None] + torch.arange(hidden.shape[1])[None, :]
    hidden = hidden + encoder.embed_positions.weight[places]
    for layer in encoder.layers[:num_layers]:
        hidden = layer(hidden, None)
    normed: torch.Tensor = encoder.layer_norm(hidden)
    return normed


def decode(
    network: WhisperForConditionalGeneration,
    encoded: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states [rows, tokens, width]; where the last layer looked [rows, heads, tokens, frames]."""
    network.config._attn_implementation = "eager"  # the fused one does not tell its attention
    output = network.model.decoder(
        input_ids=tokens,
        position_ids=places,
        encoder_hidden_states=encoded,
        use_cache=False,
        output_attentions=True,
    )
    return output.last_hidden_state, output.cross_attentions[-1]
