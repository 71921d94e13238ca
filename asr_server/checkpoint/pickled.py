"""Read files of `torch.save`, such as a `.pt` of openai-whisper, by torch's own restricted loader.

The API process runs without torch: a process of its own reads the sizes. The replica loads the tensors.
`python -m asr_server.checkpoint.pickled FILE` is the former.
"""

from __future__ import annotations

import json
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asr_server.checkpoint.files import opened, reading
from asr_server.checkpoint.foreign import ForeignModel, hugging_face_name
from asr_server.checkpoint.tensors import StoredTensor
from asr_server.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

READ_LIMIT_S: Final = 120.0  # torch's import takes a second or two, reading the descriptions less
_STATE: Final = "model_state_dict"
_MAX_PICKLE_BYTES: Final = 1 << 20  # large-v3's has 200 kB; read, it takes 80 times as much


def read_openai(path: Path) -> ForeignModel:
    """Read sizes and the tensors' shapes; their numbers stay in the file until the model is loaded.

    Raises:
        CheckpointError: it is cut short, damaged or of another kind.
    """
    check_pickled(path)
    command = [sys.executable, "-m", __spec__.name, str(path)]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=READ_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        about = json.loads(process.stdout)
        sizes = (
            int(about["dims"][name])
            for name in ("n_audio_head", "n_text_head", "n_audio_layer", "n_text_layer")
        )
        tensors = {name: StoredTensor("F32", tuple(shape), 0) for name, shape in about["shapes"].items()}
        return ForeignModel(path, tensors, *sizes, is_pickled=True)
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of openai-whisper, or it is damaged") from error


def check_pickled(path: Path) -> None:
    """Raise CheckpointError for a damaged or compressed archive, which torch would unpack into memory."""
    damaged = (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError)
    with opened(path) as file, reading(path, *damaged), zipfile.ZipFile(file) as members:
        for about in members.infolist():
            is_long = about.filename.endswith("/data.pkl") and about.file_size > _MAX_PICKLE_BYTES
            if about.compress_type != zipfile.ZIP_STORED or is_long:
                raise zipfile.BadZipFile("compressed, or with a longer description than any")


def load_pickled(path: Path, is_mapped: bool = True) -> dict[str, Tensor]:
    """Return the tensors by their Hugging Face names.

    Raises: what torch.load raises for a damaged file, or TypeError for one without tensors.
    """
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    named = {hugging_face_name(name): tensor for name, tensor in content.get(_STATE, {}).items()} or content
    if not all(isinstance(tensor, torch.Tensor) for tensor in named.values()):
        raise TypeError("a value is no tensor")
    return {name.removeprefix("model."): tensor for name, tensor in named.items()}


def main(path: str) -> None:
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    shapes = {hugging_face_name(name): list(tensor.shape) for name, tensor in content[_STATE].items()}
    print(json.dumps({"dims": dict(content["dims"]), "shapes": shapes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
