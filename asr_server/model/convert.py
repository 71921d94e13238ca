"""`asr-server convert`: a model in another program's format as a directory in Hugging Face's layout.

Called by the command line alone; it starts nothing. The server reads these formats as they are: this is for
other programs, and for who wants to keep one directory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from asr_server.checkpoint import (
    SINGLE,
    CheckpointError,
    WeightsFile,
    check_directory,
    read_foreign,
    texts_for,
    tokenizer_of,
    write_layout,
)
from asr_server.model import StoredWeights

_ORDINARY_MODE = 0o666  # less what the umask takes away


def convert(source: Path, target: Path, tokenizer: str | None = None) -> None:
    """Writes the model `source`, a .pt, ggml file or CTranslate2 folder, into the new directory `target`.

    Args:
        tokenizer: the checkpoint (a name or a directory) whose tokenizer and rules of generation to take;
            by default the model's own, or those of the published model with its vocabulary.
    Raises:
        CheckpointError: it is none of these models, the directory is not empty, or no tokenizer is had.
    """
    if target.exists() and (not target.is_dir() or os.listdir(target)):
        raise CheckpointError(f"{target} is there already: name a new directory")
    model = read_foreign(source)
    texts = tokenizer_of(tokenizer) if tokenizer else texts_for(source, model, tokenizer_of)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_layout(made, source, model, texts)
        stored = StoredWeights([WeightsFile(model.path, model.tensors)])
        weights = {f"model.{name}": tensor.clone() for name, tensor in stored.items()}
        save_file(weights, made / SINGLE, metadata={"format": "pt"})
        check_directory(made)
        umask = os.umask(0)
        os.umask(umask)
        for path in made.iterdir():
            path.chmod(_ORDINARY_MODE & ~umask)  # safetensors writes for its user alone
        made.chmod(0o777 & ~umask)
        made.replace(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
