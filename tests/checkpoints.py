"""Random checkpoints of Whisper's layouts, each made once a session and only when a test asks for it."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import SHAPES, Shape, make_checkpoint

# Everything that whisper-tiny has, in a size that needs no patience.
POCKET = SHAPES["pocket"]
LARGE_V3_NARROW = Shape(128, 2, encoder_layers=2, decoder_layers=2, num_mels=128, num_languages=100)
LARGE_V3_SHORT = Shape(1280, 20, encoder_layers=1, decoder_layers=2, num_mels=128, num_languages=100)


@cache
def _parent() -> Path:
    parent = Path(tempfile.mkdtemp(prefix="asr-server-checkpoints-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return parent


@cache
def pocket_directory() -> Path:
    return make_checkpoint(_parent() / "pocket", POCKET, lively=True)


@cache
def short_window_directory(last_timestamp_s: int = 8) -> Path:
    """The pocket checkpoint with a window of 8 s; its timestamps end there, or later."""
    shape = replace(POCKET, window_s=8, last_timestamp_s=last_timestamp_s)
    return make_checkpoint(_parent() / f"pocket-8s-{last_timestamp_s}", shape, lively=True)


@cache
def terse_directory(window_s: int) -> Path:
    """The pocket checkpoint with so few text positions that it seldom reads a window to its end at once.

    A seed was chosen whose first segments are short.
    """
    shape = replace(POCKET, window_s=window_s, last_timestamp_s=window_s, text_positions=7)
    return make_checkpoint(_parent() / f"pocket-terse-{window_s}s", shape, lively=True, seed=2)


@cache
def fragmentary_directory() -> Path:
    """The pocket checkpoint with a window of 8 s and few text positions: short parts of several segments."""
    shape = replace(POCKET, window_s=8, last_timestamp_s=8, text_positions=20)
    return make_checkpoint(_parent() / "pocket-fragmentary", shape, lively=True, seed=2)


@cache
def english_only_directory() -> Path:
    """The pocket checkpoint as a published `.en` model describes itself."""
    target = _parent() / "pocket.en"
    target.mkdir()
    for file in pocket_directory().iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "generation_config.json").read_text()) | {"is_multilingual": False}
    for name in ("lang_to_id", "task_to_id"):
        del config[name]
    (target / "generation_config.json").write_text(json.dumps(config))
    return target


@cache
def tiny_directory() -> Path:
    """whisper-tiny's layout."""
    return make_checkpoint(_parent() / "tiny", SHAPES["tiny"], lively=True)


@cache
def narrow_large_directory() -> Path:
    """large-v3's vocabulary, languages and features in the pocket checkpoint's width."""
    return make_checkpoint(_parent() / "large-narrow", LARGE_V3_NARROW, lively=True)


@cache
def large_directory() -> Path:
    """large-v3's layout with fewer layers."""
    return make_checkpoint(_parent() / "large", LARGE_V3_SHORT, lively=True)


@cache
def brief_directory() -> Path:
    """The pocket checkpoint, which goes on and on, with a text that may end at every tenth position."""
    target = _parent() / "pocket-brief"
    shutil.copytree(pocket_directory(), target)
    weights = load_file(target / "model.safetensors")
    tokens = weights["model.decoder.embed_tokens.weight"]
    places = weights["model.decoder.embed_positions.weight"][10::10].sum(dim=0)
    end_of_text = json.loads((target / "config.json").read_text())["eos_token_id"]
    tokens[end_of_text] = 3.5 * tokens.norm(dim=1).mean() * places / places.norm()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target
