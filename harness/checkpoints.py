"""Checkpoints of Whisper's real layouts with random weights, for benchmarks and parity tests.

    python -m harness.checkpoints --shape large-v3-turbo --device cuda    beforehand; else when needed

No trained weights are needed: the vocabulary is the one that openai-whisper carries, the layout is
Hugging Face's, and transformers, CTranslate2 and this project all load the directory.
"""

import argparse
import base64
import fcntl
import gc
import gzip
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from asr_server.checkpoint.tokenizer import CHARACTER_OF_BYTE
from asr_server.core import POSITIONS_PER_S

SEED = 20260101
REVISION = "3"  # of what is written: one made by an earlier revision is made anew


@dataclass(frozen=True)
class Shape:
    """The sizes of a published Whisper model, or of a smaller one with the same layout."""

    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    num_mels: int = 80
    num_languages: int = 99
    window_s: int = 30
    last_timestamp_s: int = 30
    text_positions: int = 448

    @property
    def num_timestamps(self) -> int:
        return self.last_timestamp_s * POSITIONS_PER_S + 1

    @property
    def parameters(self) -> dict[str, Any]:
        """As `WhisperConfig` takes them."""
        return {
            "d_model": self.width,
            "encoder_layers": self.encoder_layers,
            "decoder_layers": self.decoder_layers,
            "encoder_attention_heads": self.heads,
            "decoder_attention_heads": self.heads,
            "encoder_ffn_dim": 4 * self.width,
            "decoder_ffn_dim": 4 * self.width,
            "num_mel_bins": self.num_mels,
            "max_source_positions": self.window_s * POSITIONS_PER_S,
            "max_target_positions": self.text_positions,
        }


SHAPES = {
    "pocket": Shape(128, 2, encoder_layers=2, decoder_layers=2),  # no model's: for dry runs and tests
    "tiny": Shape(384, 6, 4, 4),
    "base": Shape(512, 8, 6, 6),
    "small": Shape(768, 12, 12, 12),
    "medium": Shape(1024, 16, 24, 24),
    "large-v3": Shape(1280, 20, 32, 32, num_mels=128, num_languages=100),
    "large-v3-turbo": Shape(1280, 20, 32, 4, num_mels=128, num_languages=100),
}


def make_checkpoint(
    directory: Path,
    shape: Shape,
    lively: bool = False,
    seed: int = SEED,
    device: str = "cpu",
    dtype: str = "float32",
) -> Path:
    """Writes a checkpoint in Hugging Face's layout, unless it is there already.

    Args:
        lively: scale the weights so that different audio gives different tokens, for parity tests. Otherwise
            they are scaled so that the tokens pass for speech: likely ones, and none like the one before.
            (As initialised, the decoder repeats one token that is hardly likelier than any other, and a
            server tries again at every temperature.)
        device: where the weights are drawn; a GPU's are others than the CPU's for the same seed.
        dtype: in which they are written.
    """
    complete = directory / "complete"
    if complete.exists() and complete.read_text() == REVISION:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    specials = _write_tokenizer(directory, shape)
    _write_model(directory, shape, specials, _lively if lively else _fluent, seed, device, dtype)
    _give_back_memory(device)
    complete.write_text(REVISION)
    return directory


def fix_length(directory: Path, target: Path) -> Path:
    """A sibling of a checkpoint that never ends by itself, so that every system does the same work.

    End-of-text is suppressed, and all timestamps but the first: one behind the audio's end would end a chunk.
    Weights are linked, not copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())
    configs = {n: json.loads((directory / n).read_text()) for n in ("generation_config.json", "config.json")}
    first_time = configs["generation_config.json"]["no_timestamps_token_id"] + 1
    never = (
        configs["config.json"]["eos_token_id"],
        *range(first_time + 1, configs["config.json"]["vocab_size"]),
    )
    for name, config in configs.items():
        config["suppress_tokens"] = sorted({*(config.get("suppress_tokens") or ()), *never})
        (target / name).unlink()
        (target / name).write_text(json.dumps(config))
    return target


def add_checkpoints_option(parser: argparse.ArgumentParser) -> None:
    """The folder that checkpoints are written to, once, for all benchmarks."""
    parser.add_argument(
        "--checkpoints", type=Path, default=Path(tempfile.gettempdir()) / "asr-server-benchmarks"
    )


def fixed_checkpoint(shape: str, directory: Path, device: str) -> Path:
    """A fixed-length checkpoint of that shape within `directory`. For CUDA the weights are drawn on the
    device, which takes seconds, and written in bfloat16."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:  # of two processes one writes
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = make_checkpoint(directory / shape, SHAPES[shape], device=device, dtype=dtype)
        return fix_length(made, directory / f"{shape}-fixed")


@cache
def _read_ranks() -> dict[bytes, int]:
    from whisper import tokenizer

    path = Path(tokenizer.__file__).parent / "assets" / "multilingual.tiktoken"
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in lines}


@cache
def _merges() -> list[tuple[bytes, bytes]]:
    """The pair that made each piece: what is left of it when only earlier merges are applied."""
    ranks = _read_ranks()
    merges = []
    for piece, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(piece) > 1:
            left, right = _split(piece, rank, ranks)
            merges.append((left, right))
    return merges


def _split(piece: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
        best, i = min(pairs)
        assert best < rank, f"{piece!r} cannot be made from earlier pieces"
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _written(piece: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in piece)


BEHIND_LANGUAGES: Final = (
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


def _special_names(num_languages: int) -> list[str]:
    """In Whisper's order, after the text tokens."""
    from whisper.tokenizer import LANGUAGES

    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in list(LANGUAGES)[:num_languages]),
        *BEHIND_LANGUAGES,
    ]


def _write_tokenizer(directory: Path, shape: Shape) -> dict[str, int]:
    """tokenizer.json, vocab.json and merges.txt; returns the special tokens' ids."""
    ranks = _read_ranks()
    vocabulary = {_written(piece): rank for piece, rank in ranks.items()}
    merges = [(_written(left), _written(right)) for left, right in _merges()]
    names = _special_names(shape.num_languages)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    times = [
        AddedToken(f"<|{i / POSITIONS_PER_S:.2f}|>", special=False, normalized=False)
        for i in range(shape.num_timestamps)
    ]
    tokenizer.add_tokens(times)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: len(vocabulary) + i for i, name in enumerate(names)}


def _write_model(
    directory: Path,
    shape: Shape,
    specials: dict[str, int],
    scale_of: Callable[[str, int], float],
    seed: int,
    device: str,
    dtype: str,
) -> None:
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    end = specials["<|endoftext|>"]
    ids: dict[str, Any] = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    ids["decoder_start_token_id"] = specials["<|startoftranscript|>"]
    vocabulary = specials["<|notimestamps|>"] + 1 + shape.num_timestamps
    config = WhisperConfig(vocab_size=vocabulary, begin_suppress_tokens=None, **ids, **shape.parameters)
    torch.manual_seed(seed)
    with torch.device(device):
        model: Any = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(scale_of(name, shape.width))
    model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(**ids, **_generation(specials, vocabulary, shape))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    extractor: Any = WhisperFeatureExtractor(  # type: ignore[no-untyped-call]
        feature_size=shape.num_mels, chunk_length=shape.window_s
    )
    extractor.save_pretrained(directory)


def _give_back_memory(device: str) -> None:
    """Frees a GPU, which other processes may need, of a model that only its own circles still hold."""
    import torch

    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _lively(name: str, width: int) -> float:
    """Factors found by trial: the audio's share of the scores grows with them."""
    if "conv" in name and name.endswith("weight"):
        return 10.0
    if "decoder.embed_positions" in name:
        return 5.0
    return 6.0 if "layers." in name and name.endswith(("proj.weight", "fc1.weight", "fc2.weight")) else 1.0


def _fluent(name: str, width: int) -> float:
    """The position decides the token, and the best score lies far above the others."""
    if "decoder.embed_positions" in name:
        return 20.0
    if name.endswith("decoder.layer_norm.weight"):
        return 700.0 / math.sqrt(width)  # scores of standard deviation 14
    return 1.0


def _alignment_heads(shape: Shape) -> list[tuple[int, int]]:
    """[layer, head] of the published model of this shape; none for other shapes."""
    import whisper

    names = [name for name, known in SHAPES.items() if known == shape and name in whisper._ALIGNMENT_HEADS]
    if not names:
        return []
    mask = gzip.decompress(base64.b85decode(whisper._ALIGNMENT_HEADS[names[0]]))
    return [divmod(i, shape.heads) for i, follows_speech in enumerate(mask) if follows_speech]


def _generation(specials: dict[str, int], vocabulary: int, shape: Shape) -> dict[str, Any]:
    """What the published multilingual checkpoints say, with the ids of this vocabulary."""
    from whisper.tokenizer import get_tokenizer

    languages = {name: token for name, token in specials.items() if len(name) in (6, 7)}
    never = ("<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>")
    with warnings.catch_warnings():  # it leaves its vocabulary file to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        non_speech = get_tokenizer(True).non_speech_tokens
    heads = _alignment_heads(shape)
    return {
        **({"alignment_heads": heads} if heads else {}),
        "max_length": 448,
        "is_multilingual": True,
        "lang_to_id": languages,
        "task_to_id": {"transcribe": specials["<|transcribe|>"], "translate": specials["<|translate|>"]},
        "no_timestamps_token_id": specials["<|notimestamps|>"],
        "prev_sot_token_id": specials["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "suppress_tokens": sorted(
            {*non_speech, *(specials[name] for name in never), specials["<|nospeech|>"]}
        ),
        "begin_suppress_tokens": [220, specials["<|endoftext|>"]],
        "return_timestamps": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes checkpoints of a fixed length, if they are not there."
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["tiny"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_checkpoints_option(parser)
    options = parser.parse_args()
    for shape in options.shape:
        print(fixed_checkpoint(shape, options.checkpoints, options.device))


if __name__ == "__main__":
    main()
