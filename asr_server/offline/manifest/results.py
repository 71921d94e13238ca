"""Writes the results of a manifest's entries below one folder, each whole or not at all. Used by `run.py`.

A result's path follows from the entry's id alone, so that another run, on whichever machine, finds it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from asr_server.core import Transcript
from asr_server.offline.folder import ENDINGS, write_whole
from asr_server.offline.inputs import reason_of
from asr_server.offline.job import TranscribeJob
from asr_server.offline.outputs import OutputError
from asr_server.offline.text import rendered

_MAX_NAME_BYTES: Final = 200  # without the ending
_SHARD_DIGITS: Final = 3  # 4096 folders: a listing of one stays short where there are millions of results
_UNFIT: Final = re.compile(r"[%/\x00-\x1f\x7f]")
_FOR_EVERY_RESULT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class ManifestResults:
    def __init__(self, folder: Path, job: TranscribeJob) -> None:
        self._folder = folder
        self._job = job

    def is_done(self, id: str) -> bool:
        """Whether all results of this entry are there, and may stay."""
        if self._job.existing == "overwrite":
            return False
        return all(os.path.exists(self._path(id, ENDINGS[name])) for name in self._job.formats)

    def write(self, id: str, transcript: Transcript) -> None:
        """Raises OSError for this one; OutputError where no other result could be written either."""
        try:
            for name in self._job.formats:
                content = rendered(transcript, name, self._job.render_options)
                write_whole(self._path(id, ENDINGS[name]), content)
        except OSError as error:
            if error.errno in _FOR_EVERY_RESULT:
                raise OutputError(f"cannot write to {self._folder}: {reason_of(error)}") from error
            raise

    def _path(self, id: str, ending: str) -> Path:
        digest = hashlib.blake2b(id.encode(), digest_size=10).hexdigest()
        return self._folder / digest[:_SHARD_DIGITS] / f"{_file_name(id, digest)}{ending}"


def _file_name(id: str, digest: str) -> str:
    """The id, with what a file's name cannot hold as %XX. Two ids never share a name."""
    name = _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", id)
    encoded = name.encode()
    if len(encoded) <= _MAX_NAME_BYTES:
        return name
    return f"{encoded[: _MAX_NAME_BYTES - len(digest) - 1].decode(errors='ignore')}-{digest}"
