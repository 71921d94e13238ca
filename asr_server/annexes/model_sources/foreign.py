"""The result of reading other programs' formats, and why some formats are refused.

Reads names and first bytes only.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from asr_server.annexes.model_sources.names import published_name
from asr_server.checkpoint.files import CTRANSLATE2, PICKLED, begins_with
from asr_server.checkpoint.tensors import StoredTensors, WeightsFile, count_layers
from asr_server.errors import CheckpointError

GGML: Final = b"lmgg"
_ZIP, _GGUF = b"PK\x03\x04", b"GGUF"


def is_ctranslate2(files: Collection[str]) -> bool:
    return CTRANSLATE2 in files and any(file.startswith("vocabulary.") for file in files)


def check_foreign_file(path: Path) -> None:
    """Raise CheckpointError unless its first bytes are openai-whisper's or whisper.cpp's."""
    if begins_with(path, GGML, _ZIP):
        return
    if begins_with(path, _GGUF):
        raise CheckpointError(f"{path} is a GGUF model. {_use_original(path.name)}")
    if (path.parent / "config.json").exists():
        raise CheckpointError(f"{path} is a file: name the directory it is in, {path.parent}")
    raise CheckpointError(
        f"{path} is no model: a .pt of openai-whisper, a ggml file of whisper.cpp, or a directory with "
        "config.json and weights is one"
    )


def explain_listing(name: str, files: Collection[str]) -> str | None:
    endings = {Path(file).suffix for file in files}
    if is_ctranslate2(files) or PICKLED in files or ".safetensors" in endings:
        return None if "config.json" in files else f"{name} has no config.json"
    if single := [file for file in files if file.startswith("ggml-") or file.endswith((".pt", ".pth"))]:
        return f"{name} holds single files, such as {min(single)}: fetch one and name that file"
    if ".gguf" in endings:
        return f"{name} holds GGUF models. {_use_original(name)}"
    if ".npz" in endings:
        return f"{name} is an MLX model. {_use_original(name)}"
    return None


def _use_original(name: str) -> str:
    if published := published_name(name):
        return f"Use the model that it was made from: {published}"
    return "Use the checkpoint that it was made from: DIRECTORY or ORGANISATION/NAME"


_HEAD_WIDTH = 64  # of every published model

# openai-whisper's names to Hugging Face's, in the order applied: what comes first is part of later ones.
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
    """Translate openai-whisper's name: `blocks.0.attn_ln` to `layers.0.self_attn_layer_norm`."""
    for pattern, renamed in _RENAMED:
        name = re.sub(pattern, renamed, name)
    return name


class ForeignModel(NamedTuple):
    path: Path  # of the file with the weights
    tensors: StoredTensors  # by Hugging Face's names, without the leading `model.`
    names: Mapping[str, str]  # of a pickled file, to those names: its tensors have shapes alone; else empty
    encoder_heads: int
    decoder_heads: int
    encoder_layers: int = 0  # as the file states them; 0: it states none, its tensors are counted
    decoder_layers: int = 0

    def weights_file(self) -> WeightsFile:
        return WeightsFile(self.path, {} if self.names else self.tensors, self.names)

    def config(self) -> dict[str, Any]:
        """Return config.json without special tokens. Raises CheckpointError: a tensor is missing."""
        try:
            width, num_mels, _ = self.tensors["encoder.conv1.weight"].shape
            config = {
                "model_type": "whisper",
                "architectures": ["WhisperForConditionalGeneration"],
                "activation_function": "gelu",
                "vocab_size": self.tensors["decoder.embed_tokens.weight"].shape[0],
                "num_mel_bins": num_mels,
                "d_model": width,
                "max_source_positions": self.tensors["encoder.embed_positions.weight"].shape[0],
                "max_target_positions": self.tensors["decoder.embed_positions.weight"].shape[0],
            }
            for part, num_heads, num_layers in (
                ("encoder", self.encoder_heads, self.encoder_layers),
                ("decoder", self.decoder_heads, self.decoder_layers),
            ):
                config[f"{part}_layers"] = num_layers or count_layers(self.tensors, part)
                config[f"{part}_attention_heads"] = num_heads or width // _HEAD_WIDTH
                config[f"{part}_ffn_dim"] = self.tensors[f"{part}.layers.0.fc1.weight"].shape[0]
            return config
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path} is no Whisper model ({error} is missing)") from error
