"""Fetches checkpoints from the Hugging Face hub, each file once; without a network the cache serves.

Used by `resolve_checkpoint` and by `asr-server convert`. Blocks for as long as the download takes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from asr_server.checkpoint.error import CheckpointError
from asr_server.checkpoint.foreign import explain_listing
from asr_server.checkpoint.weights import INDEX, PICKLED, SINGLE

ANSWER_LIMIT_S = 10.0
_TEXTS = ["*.json", "*.txt"]
_FILES = "config.json generation_config.json preprocessor_config.json tokenizer.json model.safetensors"


class _Unreachable(Exception):
    """The hub did not answer; the message says why in a few words."""


def fetch(name: str, with_weights: bool = True) -> Path:
    """The directory in the cache of the hub's model `name`, downloaded if need be.

    Raises:
        CheckpointError: the hub has no such model, or cannot be reached and the cache does not have it.
    """
    from huggingface_hub import snapshot_download

    try:
        files = _list_files(name)
    except _Unreachable as reason:
        return _cached(name, reason)
    explanation = explain_listing(name, files)
    if explanation:
        raise CheckpointError(explanation)
    patterns = [*_TEXTS, *_weights(files)] if with_weights else _TEXTS
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the network, the disk: the library has many types for them
        raise CheckpointError(
            f"{name} could not be fetched whole ({_in_a_line(error)}); what has arrived is kept: try again"
        ) from error


def _list_files(name: str) -> list[str]:
    """The names of the model's files. Asks once: the library's other calls try again for 20 s."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return [file.rfilename for file in HfApi().model_info(name, timeout=ANSWER_LIMIT_S).siblings or []]
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms on its page at the hub, then log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"the Hugging Face hub has no model {name}, or it is private: then log in with `hf auth login`"
        ) from error
    except Exception as error:  # no network, no answer in time, told to stay offline
        raise _Unreachable(_in_a_line(error)) from error


def _weights(files: Collection[str]) -> list[str]:
    """Patterns of one set of weights: many repositories hold the same ones in several formats."""
    if SINGLE in files:
        return [SINGLE]
    return ["model-*.safetensors"] if INDEX in files else [PICKLED]


def _cached(name: str, reason: _Unreachable) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:
        directory = name.rpartition("/")[2]
        raise CheckpointError(
            f"the Hugging Face hub cannot be reached ({reason}), and {name} was not fetched before. Offline: "
            f"on a machine with a network run `hf download {name} {_FILES} --local-dir {directory}`, "
            f"copy the directory here and use --model ./{directory}"
        ) from error


def _in_a_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
