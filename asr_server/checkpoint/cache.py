"""Says where models lie on this machine: in the Hugging Face cache, and in this server's own beside it.

One variable, HF_HOME, moves both. Own folder: `models/NAME@REVISION` has what was fetched, `readings/` what
`adopt.py` writes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def hub_cache() -> Path:
    """The folder that huggingface_hub, transformers and faster-whisper keep models in."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _expanded(given) if given else _home() / "hub"


def own_cache() -> Path:
    """The folder in which this server keeps models that it has fetched. It need not be there yet."""
    return _home() / "asr-server"


def writable(folder: str) -> Path:
    """The subfolder of the own cache with that name, made if need be.

    Where nothing can be written there (a read-only container, say), one that is gone when the process ends.
    """
    path = own_cache() / folder
    try:
        path.mkdir(parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    return _temporary()


@cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="asr-server-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _home() -> Path:
    """As huggingface_hub finds it, whose import would take longer than all else at a start."""
    given = os.environ.get("HF_HOME")
    return _expanded(given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))


def _expanded(path: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(path)))
