"""Random checkpoints of Whisper's layouts, made when a test asks for one and kept in .cache/checkpoints."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from safetensors.torch import load_file, save_file

import asr_server.checkpoint.tokenizer
import asr_server.core
import harness.checkpoints
from asr_server.checkpoint.tokenizer import Tokenizer
from harness.checkpoints import SEED, SHAPES, Shape, make_checkpoint

CACHE = Path(__file__).parents[2] / ".cache" / "checkpoints"
_CODE = (
    __file__,
    harness.checkpoints.__file__,
    asr_server.checkpoint.tokenizer.__file__,
    asr_server.core.__file__,
)
_PACKAGES = ("torch", "transformers", "tokenizers", "openai-whisper", "ctranslate2")
_KEPT = 2  # folders: of today's code, and of the code before

# Everything that whisper-tiny has, in a size that needs no patience.
POCKET = SHAPES["pocket"]
LARGE_V3_NARROW = Shape(128, 2, encoder_layers=2, decoder_layers=2, num_mels=128, num_languages=100)
LARGE_V3_SHORT = Shape(1280, 20, encoder_layers=1, decoder_layers=2, num_mels=128, num_languages=100)

kept_tokenizer = cache(Tokenizer.from_directory)  # fifty thousand tokens take half a second


@cache
def _folder() -> Path:
    """Return the folder of what this code makes with these packages; remove those of older code."""
    made_by = [*(Path(path).read_text() for path in _CODE), *map(_version, _PACKAGES)]
    folder = CACHE / hashlib.sha256("\n".join(made_by).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    with _lock(CACHE / "folders"):
        folders = [path for path in CACHE.iterdir() if path.is_dir()]
        for old in sorted(folders, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old)
    return folder


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a GPU machine has a part of them
        return ""


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """Return the directory of this name, which `make` has filled in this run or an earlier one."""
    target = _folder() / name
    with _lock(target):  # several processes may ask for it at once
        if not target.exists():
            part = target.with_name(f"{name}.part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(target)
    return target


def _made(name: str, shape: Shape, seed: int = SEED) -> Path:
    return kept(name, lambda directory: make_checkpoint(directory, shape, lively=True, seed=seed))


@cache
def pocket_directory() -> Path:
    return _made("pocket", POCKET)


@cache
def short_window_directory(last_timestamp_s: int = 8) -> Path:
    """The pocket checkpoint with a window of 8 s; its timestamps end there, or later."""
    shape = replace(POCKET, window_s=8, last_timestamp_s=last_timestamp_s)
    return _made(f"pocket-8s-{last_timestamp_s}", shape)


@cache
def terse_directory(window_s: int) -> Path:
    """The pocket checkpoint with so few text positions that it seldom reads a window to its end at once.

    A seed was chosen whose first segments are short.
    """
    shape = replace(POCKET, window_s=window_s, last_timestamp_s=window_s, text_positions=7)
    return _made(f"pocket-terse-{window_s}s", shape, seed=2)


@cache
def fragmentary_directory() -> Path:
    """The pocket checkpoint with a window of 8 s and few text positions: short parts of several segments."""
    shape = replace(POCKET, window_s=8, last_timestamp_s=8, text_positions=20)
    return _made("pocket-fragmentary", shape, seed=2)


@cache
def english_only_directory() -> Path:
    """The pocket checkpoint as a published `.en` model describes itself."""
    return kept("pocket.en", _write_english_only)


def _write_english_only(target: Path) -> None:
    shutil.copytree(pocket_directory(), target)
    config = json.loads((target / "generation_config.json").read_text()) | {"is_multilingual": False}
    for name in ("lang_to_id", "task_to_id"):
        del config[name]
    (target / "generation_config.json").write_text(json.dumps(config))


@cache
def tiny_directory() -> Path:
    """whisper-tiny's layout."""
    return _made("tiny", SHAPES["tiny"])


@cache
def narrow_large_directory() -> Path:
    """large-v3's vocabulary, languages and features in the pocket checkpoint's width."""
    return _made("large-narrow", LARGE_V3_NARROW)


@cache
def large_directory() -> Path:
    """large-v3's layout with fewer layers."""
    return _made("large", LARGE_V3_SHORT)


@cache
def brief_directory() -> Path:
    """The pocket checkpoint, which goes on and on, with a text that may end at every tenth position."""
    return kept("pocket-brief", _write_brief)


def _write_brief(target: Path) -> None:
    shutil.copytree(pocket_directory(), target)
    weights = load_file(target / "model.safetensors")
    tokens = weights["model.decoder.embed_tokens.weight"]
    places = weights["model.decoder.embed_positions.weight"][10::10].sum(dim=0)
    end_of_text = json.loads((target / "config.json").read_text())["eos_token_id"]
    tokens[end_of_text] = 3.5 * tokens.norm(dim=1).mean() * places / places.norm()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
