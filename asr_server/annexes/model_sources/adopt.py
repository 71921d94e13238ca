"""Make a directory in Hugging Face's layout for a model in another program's format.

It holds the small files and a note of each tensor's place in the other file (`files.STORED`), so no
weight is copied. Its name in the cache depends on the file's path, size and date, and on the small files'
contents.
"""

import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from asr_server.annexes.model_sources.foreign import GGML, ForeignModel
from asr_server.annexes.model_sources.names import published_heads, published_name
from asr_server.annexes.model_sources.readers import read_ctranslate2, read_ggml, read_openai
from asr_server.checkpoint import files
from asr_server.checkpoint.sizes import FEATURES
from asr_server.checkpoint.tensors import check_layout, read_stored, write_stored
from asr_server.core import POSITIONS_PER_S
from asr_server.errors import CheckpointError

_LAYOUT_VERSION: Final = 3  # of what is written here: another one makes the directories anew
# The published model from which the tokenizer of each vocabulary is taken.
_TOKENIZERS: Final = {
    files.ENGLISH_VOCABULARY: "tiny.en",
    files.MULTILINGUAL_VOCABULARY: "base",
    files.CANTONESE_VOCABULARY: "base",  # with one language more
}
_FIRST_TIMESTAMP_LIMIT: Final = 50  # 1 s, in every published model and in openai-whisper
_CANTONESE: Final = 50358  # that language's token; those from here on are one further there
_IDS_OF_CONFIG: Final = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_SMALL_FILES: Final = ("config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json")
FindTexts = Callable[[str], Path]


def adopt(source: Path, find_texts: FindTexts, revision: str = "") -> Path:
    """Return the directory for a foreign model; make it if necessary.

    `find_texts` returns a directory with the tokenizer of a published model. `revision` is the hub's commit.
    Raises CheckpointError: unknown, damaged or quantized, or no tokenizer is found.
    """
    source = source.absolute()
    path = source / files.CTRANSLATE2 if source.is_dir() else source
    with files.reading(path):
        about = path.stat()
    small = [source / name for name in _SMALL_FILES]
    digests = [hashlib.sha256(files.read_small(each)).hexdigest() if each.exists() else "" for each in small]
    identity = f"{_LAYOUT_VERSION}|{path}|{about.st_size}|{about.st_mtime_ns}|{revision}|{digests}"
    folder = files.writable("readings")
    target = folder / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not (target / files.STORED).exists():
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            model = read_foreign(source)
            write_layout(made, source, model, texts_for(source, model, find_texts))
            if model.names:  # its shapes are known here alone
                shapes = {name: tensor.shape for name, tensor in model.tensors.items()}
                check_layout(shapes, files.read_json(made / "config.json"), source)
            write_stored(made, model.weights_file(), source=str(source), revision=revision)
            os.chmod(made, 0o755)  # nosec B103 # others may read a model, as in a folder made by mkdir
            made.rename(target)
        except OSError:
            if not (target / files.STORED).exists():  # another process was sooner
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    read_stored(target)
    return target


def read_foreign(source: Path) -> ForeignModel:
    """Read a CTranslate2 folder, a `.pt` or a ggml file. Raises CheckpointError."""
    if source.is_dir():
        return read_ctranslate2(source / files.CTRANSLATE2)
    return read_ggml(source) if files.begins_with(source, GGML) else read_openai(source)


def write_layout(target: Path, source: Path, model: ForeignModel, texts: Path) -> None:
    """Write all but the weights into `target`; `texts` has the tokenizer. Raises CheckpointError."""
    config = model.config()
    own = source if source.is_dir() else None
    tokenizer, rules = files.read_json(texts / "tokenizer.json"), _rules(own or texts)
    if own is None:
        rules["alignment_heads"] = published_heads(config, published_name(source.stem))
    has_cantonese = config["vocab_size"] == files.CANTONESE_VOCABULARY
    if has_cantonese and _ids(tokenizer)["<|notimestamps|>"] == _CANTONESE + 5:  # of a tokenizer without
        _add_cantonese(tokenizer, rules if own is None else {})
        _write_json(target / "tokenizer.json", tokenizer)
    else:  # megabytes, as they are
        shutil.copyfile(texts / "tokenizer.json", target / "tokenizer.json")
    try:
        named = _ids(tokenizer)
        ids = _special_ids(named)
    except KeyError as error:
        raise CheckpointError(
            f"{texts / 'tokenizer.json'} is no Whisper tokenizer: {error} is missing"
        ) from error
    rules |= ids | {"is_multilingual": config["vocab_size"] > files.ENGLISH_VOCABULARY}
    if rules["is_multilingual"]:
        is_language = files.LANGUAGE_TOKEN.fullmatch
        rules["lang_to_id"] = {name: token for name, token in named.items() if is_language(name)}
        rules["task_to_id"] = {task: named[f"<|{task}|>"] for task in ("transcribe", "translate")}
    preprocessor = files.read_optional_json(source / "preprocessor_config.json") if own else {}
    contents = {
        "config.json": config | {name: ids[name] for name in _IDS_OF_CONFIG},
        "generation_config.json": rules,
        "preprocessor_config.json": preprocessor or _preprocessor(config),
    }
    for name, content in contents.items():
        _write_json(target / name, content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def texts_for(source: Path, model: ForeignModel, find_texts: FindTexts) -> Path:
    """Return where the model's tokenizer is, or a published one of its vocabulary. Raises CheckpointError."""
    if (source / "tokenizer.json").exists():
        return source
    vocabulary = model.config()["vocab_size"]
    if vocabulary not in _TOKENIZERS:
        raise CheckpointError(
            f"{source} comes without a tokenizer, and its vocabulary of {vocabulary} tokens is no published "
            f"model's: `asr-server convert {shlex.quote(str(source))} DIRECTORY --tokenizer CHECKPOINT` "
            "makes one of it that has a tokenizer"
        )
    try:
        return find_texts(_TOKENIZERS[vocabulary])
    except CheckpointError as error:
        raise CheckpointError(f"{source} comes without a tokenizer: {error}") from error


def _rules(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    config = files.read_json(path if path.exists() else directory / "config.json")
    return {
        "suppress_tokens": config.get("suppress_tokens", config.get("suppress_ids")) or [],
        "begin_suppress_tokens": config.get("begin_suppress_tokens", config.get("suppress_ids_begin")) or [],
        "alignment_heads": config.get("alignment_heads") or [],
        "max_initial_timestamp_index": config.get("max_initial_timestamp_index", _FIRST_TIMESTAMP_LIMIT),
    }


def _add_cantonese(tokenizer: dict[str, Any], rules: dict[str, Any]) -> None:
    shifted = [token | {"id": _shifted(token["id"])} for token in tokenizer["added_tokens"]]
    last_language = next(token for token in shifted if token["id"] == _CANTONESE - 1)
    tokenizer["added_tokens"] = [*shifted, last_language | {"id": _CANTONESE, "content": "<|yue|>"}]
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if name in rules:
            rules[name] = [_shifted(token) for token in rules[name]]


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {token["content"]: token["id"] for token in tokenizer["added_tokens"]}


def _special_ids(ids: dict[str, int]) -> dict[str, int]:
    end = ids["<|endoftext|>"]
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
    }


def _shifted(token: int) -> int:
    return token + (token >= _CANTONESE)


def _preprocessor(config: dict[str, Any]) -> dict[str, Any]:
    window_s = config["max_source_positions"] / POSITIONS_PER_S
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        # A whole number where it is one: transformers counts samples by it, and refuses half of one.
        "chunk_length": int(window_s) if window_s.is_integer() else window_s,
        **FEATURES,
    }
