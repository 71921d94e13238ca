"""`asr-server convert`: a model of openai-whisper or whisper.cpp to Hugging Face's layout, which serves.

Called by the command line alone. It writes a directory and starts nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from asr_server.checkpoint import (
    SINGLE,
    CheckpointError,
    base_model,
    check_directory,
    checkpoint_on_disk,
    fetch,
    hub_name,
)
from asr_server.convert.ggml import MAGIC, read_ggml
from asr_server.convert.layout import configuration, hugging_face_name
from asr_server.convert.model import OpenAIModel
from asr_server.convert.openai import read_openai

TEXT_ENDINGS = (".json", ".txt")


def convert(source: Path, target: Path, tokenizer: str | None = None) -> None:
    """Writes the model in the file `source` as a checkpoint into the new directory `target`.

    These files hold no tokenizer that could be used: it comes, with the rules of generation, from the
    checkpoint `tokenizer` (a name or a directory), or from the published model of the same size.

    Raises:
        CheckpointError: the file is none of these models, the directory is not empty, or no tokenizer is had.
    """
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise CheckpointError(f"{target} is there already: name a new directory")
    model = _read(source)
    config = configuration(model.sizes)
    tokenizer = tokenizer or base_model(config)
    if tokenizer is None:
        raise CheckpointError(f"{source} has the size of no published model: say --tokenizer")
    texts = _text_files(tokenizer)
    target.mkdir(parents=True, exist_ok=True)
    for file in texts:
        shutil.copy(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = {hugging_face_name(name): tensor.contiguous() for name, tensor in model.tensors.items()}
    save_file(weights, target / SINGLE, metadata={"format": "pt"})
    check_directory(target)


def _read(source: Path) -> OpenAIModel:
    try:
        with source.open("rb") as file:
            is_ggml = file.read(len(MAGIC)) == MAGIC
        return read_ggml(source) if is_ggml else read_openai(source)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror}") from error


def _text_files(tokenizer: str) -> list[Path]:
    """Everything of that checkpoint but its weights and its sizes."""
    directory = checkpoint_on_disk(tokenizer) or fetch(hub_name(tokenizer), with_weights=False)
    return [
        path
        for path in sorted(directory.iterdir())
        if path.suffix in TEXT_ENDINGS and path.name != "config.json" and not path.name.startswith(SINGLE)
    ]
