"""Where a checkpoint's files are, and what is wrong with them, before anything heavy starts.

No torch: the API process needs them too, for the tokenizer. Every error is one line that says what to do.
"""

from asr_server.checkpoint.adopt import is_ctranslate2, read_foreign, source_of, texts_for, write_layout
from asr_server.checkpoint.download import hub_cache, own_cache
from asr_server.checkpoint.files import (
    SINGLE,
    STORED,
    AudioWindow,
    StoredTensor,
    WeightsFile,
    find_weights,
    read_json,
    read_optional_json,
)
from asr_server.checkpoint.find import (
    cached,
    check_directory,
    checkpoint_on_disk,
    name_elsewhere,
    resolve_checkpoint,
    revision_of,
    tokenizer_of,
)
from asr_server.checkpoint.names import SHORT_NAMES, Published, published
from asr_server.errors import CheckpointError

__all__ = [
    "SHORT_NAMES",
    "SINGLE",
    "STORED",
    "AudioWindow",
    "CheckpointError",
    "Published",
    "StoredTensor",
    "WeightsFile",
    "cached",
    "check_directory",
    "checkpoint_on_disk",
    "find_weights",
    "hub_cache",
    "is_ctranslate2",
    "name_elsewhere",
    "own_cache",
    "published",
    "read_foreign",
    "read_json",
    "read_optional_json",
    "resolve_checkpoint",
    "revision_of",
    "source_of",
    "texts_for",
    "tokenizer_of",
    "write_layout",
]
