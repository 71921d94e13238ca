"""The published weights that tests and benchmarks run on, as files that every system can be given."""

import os
from contextlib import suppress
from pathlib import Path

from asr_server.annexes.model_sources.convert import convert
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.model_sources.foreign import is_ctranslate2
from asr_server.checkpoint.files import own_cache, source_of


def hugging_face_checkpoint(model: str) -> Path:
    """The directory of a published model, fetched if need be, or of one's own, in Hugging Face's layout.

    Made once, in float16 as the weights are published, and kept in the cache.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be fetched.
    """
    source = source_of(resolve_checkpoint(model))
    if not (source.is_dir() and is_ctranslate2(os.listdir(source))):
        return source
    target = own_cache() / "hugging-face" / f"whisper-{Path(model).name}"
    if not target.exists():
        made = target.with_name(f"{target.name}-{os.getpid()}")
        convert(source, made)
        with suppress(OSError):  # another process was sooner
            made.rename(target)
    return target
