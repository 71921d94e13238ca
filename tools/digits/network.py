"""The network: transformers' Whisper modules, with features and windows of any length for training."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.audio_utils import mel_filter_bank

from .clips import SAMPLE_RATE
from .vocabulary import NUM_TIMESTAMPS, Vocabulary

NUM_CTC_CLASSES = 11  # blank, ten digits


def make_config(words: Vocabulary) -> WhisperConfig:
    """The sizes of whisper-digits."""
    return WhisperConfig(
        vocab_size=words.size,
        num_mel_bins=80,
        d_model=128,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=512,
        max_source_positions=1500,
        max_target_positions=448,
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
        network.model.encoder.embed_positions.weight.copy_(positions[:1500])
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


class LogMel(nn.Module):
    """WhisperFeatureExtractor's log-mel for batches of any length."""

    def __init__(self) -> None:
        super().__init__()
        filters = mel_filter_bank(201, 80, 0.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        self.filters: torch.Tensor
        self.window: torch.Tensor
        self.register_buffer("filters", torch.tensor(filters.T, dtype=torch.float32))
        self.register_buffer("window", torch.hann_window(400))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """float32 [rows, samples] to [rows, 80, samples / 160]."""
        spectrum = torch.stft(samples, 400, 160, window=self.window, return_complex=True)[..., :-1]
        power = spectrum.real**2 + spectrum.imag**2
        log_mel = torch.log10(torch.clamp(self.filters @ power, min=1e-10))
        top = log_mel.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(log_mel, top - 8.0) + 4.0) / 4.0


def encode(
    network: WhisperForConditionalGeneration, features: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """The encoder on windows shorter than 30 s that begin at position ``shift`` [rows] of the table.

    features [rows, 80, frames] to [rows, frames / 2, width].
    """
    encoder = network.model.encoder
    # On a CPU in bfloat16 torch's fused attention is the slower one for windows of up to 8 s.
    network.config._attn_implementation = "eager" if features.shape[-1] <= 800 else "sdpa"
    hidden = nn.functional.gelu(encoder.conv1(features))
    hidden = nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
    places = shift[:, None] + torch.arange(hidden.shape[1])[None, :]
    hidden = hidden + encoder.embed_positions.weight[places]
    for layer in encoder.layers:
        hidden = layer(hidden, None)
    normed: torch.Tensor = encoder.layer_norm(hidden)
    return normed


def decode(
    network: WhisperForConditionalGeneration, encoded: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Logits [rows, tokens, vocabulary] for the whole of ``tokens`` at once."""
    output = network.model.decoder(input_ids=tokens, encoder_hidden_states=encoded, use_cache=False)
    logits: torch.Tensor = network.proj_out(output.last_hidden_state)
    return logits
