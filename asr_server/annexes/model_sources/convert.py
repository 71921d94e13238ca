"""Write another program's model as a checkpoint in Hugging Face's layout, for `asr-server convert`.

The server reads such models as they are.
"""

import os
import secrets
import shutil
from pathlib import Path

from safetensors.torch import save_file

from asr_server.annexes.model_sources.adopt import read_foreign, texts_for, write_layout
from asr_server.annexes.model_sources.find import check_directory, tokenizer_of
from asr_server.checkpoint.files import SINGLE
from asr_server.errors import CheckpointError
from asr_server.model.weights import open_weights


def convert(source: Path, target: Path, tokenizer: str | None = None) -> None:
    """Write a .pt, ggml or CTranslate2 model into the new directory `target`.

    The tokenizer is that of the checkpoint `tokenizer`, else the model's own or a published one's.
    Raises CheckpointError: unknown format, non-empty directory, or no tokenizer.
    """
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise CheckpointError(f"{target} is there already: name a new directory")
    model = read_foreign(source)
    texts = tokenizer_of(tokenizer) if tokenizer else texts_for(source, model, tokenizer_of)
    made = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    made.mkdir(parents=True)
    try:
        write_layout(made, source, model, texts)
        stored = open_weights([model.weights_file()])
        weights = {f"model.{name}": tensor.clone() for name, tensor in stored.items()}
        save_file(weights, made / SINGLE, metadata={"format": "pt"})
        shutil.copymode(made / "config.json", made / SINGLE)  # safetensors writes for its user alone
        check_directory(made)
        made.replace(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
