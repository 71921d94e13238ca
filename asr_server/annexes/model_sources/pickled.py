"""Read the sizes in a `.pt` of openai-whisper by torch's own restricted loader.

The API process runs without torch: `main` is a process of its own.
"""

from __future__ import annotations

import json
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
from pathlib import Path
from typing import Final

from asr_server.annexes.model_sources.foreign import ForeignModel, hugging_face_name
from asr_server.checkpoint.tensors import StoredTensor, check_pickled
from asr_server.errors import CheckpointError

READ_LIMIT_S: Final = 120.0  # torch's import takes a second or two, reading the descriptions less


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
        names = {name: hugging_face_name(name) for name in about["shapes"]}
        tensors = {
            names[name]: StoredTensor("F32", tuple(shape), 0) for name, shape in about["shapes"].items()
        }
        return ForeignModel(path, tensors, names, *sizes)
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint of openai-whisper, or it is damaged") from error


def main(path: str) -> None:
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    shapes = {name: list(tensor.shape) for name, tensor in content["model_state_dict"].items()}
    print(json.dumps({"dims": dict(content["dims"]), "shapes": shapes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
