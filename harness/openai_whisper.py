"""openai/whisper on a checkpoint of Hugging Face's layout."""

import json
import re
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.core import Samples
from asr_server.model import WhisperSizes

_NAMES = (  # Hugging Face's, and openai/whisper's; several may be part of one name
    (r"encoder\.embed_positions\.weight", "encoder.positional_embedding"),
    (r"decoder\.embed_positions\.weight", "decoder.positional_embedding"),
    (r"embed_tokens", "token_embedding"),
    (r"encoder\.layer_norm", "encoder.ln_post"),
    (r"decoder\.layer_norm", "decoder.ln"),
    (r"\.layers\.", ".blocks."),
    (r"\.self_attn_layer_norm", ".attn_ln"),
    (r"\.encoder_attn_layer_norm", ".cross_attn_ln"),
    (r"\.final_layer_norm", ".mlp_ln"),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"out_proj", "out"),
    (r"\.fc1", ".mlp.0"),
    (r"\.fc2", ".mlp.2"),
)


def load_openai_whisper(directory: Path) -> Any:
    from whisper.model import ModelDimensions, Whisper
    from whisper.tokenizer import get_encoding

    sizes = WhisperSizes.from_directory(directory)
    model = Whisper(
        ModelDimensions(
            n_mels=sizes.num_mels,
            n_audio_ctx=sizes.audio_positions,
            n_audio_state=sizes.width,
            n_audio_head=sizes.encoder_heads,
            n_audio_layer=sizes.encoder_layers,
            n_vocab=sizes.vocabulary,
            n_text_ctx=sizes.text_positions,
            n_text_state=sizes.width,
            n_text_head=sizes.decoder_heads,
            n_text_layer=sizes.decoder_layers,
        )
    )
    name = "multilingual" if model.is_multilingual else "gpt2"
    with warnings.catch_warnings():  # it reads its vocabulary once, and never closes the file
        warnings.simplefilter("ignore", ResourceWarning)
        get_encoding(name=name, num_languages=model.num_languages)
    tensors = load_file(directory / "model.safetensors")
    weights = {_openai_name(name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    model.load_state_dict({name: tensor for name, tensor in weights.items() if name != "proj_out.weight"})
    pairs = json.loads((directory / "generation_config.json").read_text()).get("alignment_heads")
    if pairs:
        mask = torch.zeros(sizes.decoder_layers, sizes.decoder_heads, dtype=torch.bool)
        for layer, head in pairs:
            mask[layer, head] = True
        model.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)
    return model.eval()


def transcribed_features(samples: Samples, num_mels: int, num_frames: int) -> torch.Tensor:
    """[num_mels, num_frames], as its `transcribe` makes them of a recording of one window."""
    from whisper.audio import N_FRAMES, N_SAMPLES, log_mel_spectrogram, pad_or_trim

    mel = log_mel_spectrogram(samples, num_mels, padding=N_SAMPLES)
    window: torch.Tensor = pad_or_trim(mel[:, :-N_FRAMES], num_frames)
    return window


def _openai_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


class _TokenByToken(NamedTuple):
    """Stands in for openai/whisper's tokenizer: every token is a word of its own."""

    sot_sequence: list[int]
    no_timestamps: int
    eot: int

    def split_to_word_tokens(self, tokens: list[int]) -> tuple[list[str], list[list[int]]]:
        return [str(token) for token in tokens], [[token] for token in tokens]


def token_times_s(
    model: Any, tokenizer: Tokenizer, samples: Samples, tokens: Sequence[int], language: str | None
) -> list[float]:
    """When each text token among `tokens` begins, and when the last ends, by its `find_alignment`."""
    from whisper.audio import N_FRAMES, log_mel_spectrogram, pad_or_trim
    from whisper.timing import find_alignment

    _keep_what_is_compiled()
    specials = tokenizer.specials
    before = [specials.start_of_transcript]
    if specials.is_multilingual and language is not None:
        before.append(specials.languages[language])
    if specials.is_multilingual and specials.transcribe is not None:
        before.append(specials.transcribe)
    stand_in = _TokenByToken(before, specials.no_timestamps, specials.end_of_text)
    mel = log_mel_spectrogram(samples, model.dims.n_mels, padding=N_FRAMES * 160)
    num_frames = mel.shape[-1] - N_FRAMES
    text = [token for token in tokens if tokenizer.is_text(token)]
    window = pad_or_trim(mel, 2 * model.dims.n_audio_ctx)
    words = find_alignment(model, stand_in, text, window, num_frames)
    return [float(word.start) for word in words] + [float(words[-1].end)]


@cache
def _keep_what_is_compiled() -> None:
    """Compile its time warping once for all processes, which else takes each of them seconds."""
    import numba
    from whisper import timing

    for name in ("backtrace", "dtw_cpu"):
        setattr(timing, name, numba.njit(getattr(timing, name).py_func, cache=True))
