"""Writes openai-whisper's names and sizes as Hugging Face does. Used by `convert` alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

# In the order applied; what stands first is part of what stands later.
_RENAMED: Final = (
    (r"\bblocks\b", "layers"),
    (r"\bcross_attn\b", "encoder_attn"),
    (r"\bcross_attn_ln\b", "encoder_attn_layer_norm"),
    (r"\battn\b", "self_attn"),
    (r"\battn_ln\b", "self_attn_layer_norm"),
    (r"\bquery\b", "q_proj"),
    (r"\bkey\b", "k_proj"),
    (r"\bvalue\b", "v_proj"),
    (r"\bout\b", "out_proj"),
    (r"\bmlp\.0\b", "fc1"),
    (r"\bmlp\.2\b", "fc2"),
    (r"\bmlp_ln\b", "final_layer_norm"),
    (r"\b(ln_post|ln)\b", "layer_norm"),
    (r"\btoken_embedding\b", "embed_tokens"),
    (r"\bpositional_embedding\b", "embed_positions.weight"),
)


def hugging_face_name(name: str) -> str:
    """`decoder.blocks.0.attn_ln.bias` is `model.decoder.layers.0.self_attn_layer_norm.bias`."""
    for pattern, renamed in _RENAMED:
        name = re.sub(pattern, renamed, name)
    return f"model.{name}"


def configuration(sizes: Mapping[str, int]) -> dict[str, Any]:
    """config.json. The ids of special tokens are left to generation_config.json and the tokenizer."""
    width = sizes["n_audio_state"]
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "activation_function": "gelu",
        "vocab_size": sizes["n_vocab"],
        "num_mel_bins": sizes["n_mels"],
        "d_model": width,
        "encoder_layers": sizes["n_audio_layer"],
        "encoder_attention_heads": sizes["n_audio_head"],
        "encoder_ffn_dim": 4 * width,
        "decoder_layers": sizes["n_text_layer"],
        "decoder_attention_heads": sizes["n_text_head"],
        "decoder_ffn_dim": 4 * width,
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
    }
