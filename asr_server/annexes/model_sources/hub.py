"""Download a published model from the Hugging Face hub, by huggingface_hub in a process of its own.

The library resumes, shows how far it is on a terminal, and gives up where nothing arrives; this module
checks sums. `main` is that process. Blocks: never call it on an event loop.
"""

import hashlib
import json
import logging
import os
import re
import subprocess  # nosec B404 # arguments are lists, and no shell is started
import sys
from pathlib import Path
from typing import Any, Final

from asr_server.annexes.model_sources.foreign import explain_listing
from asr_server.annexes.model_sources.names import Published
from asr_server.checkpoint.files import CTRANSLATE2, INDEX, PICKLED, SINGLE
from asr_server.errors import CheckpointError, NotFetched
from asr_server.process import be_killed_with_the_parent

LIST_LIMIT_S: Final = 5.0  # for the list of files, connecting included
CONNECT_LIMIT_S: Final = 4.0  # to the host of the files
LIBRARY_FOLDER: Final = ".cache"  # huggingface_hub's own, in the folder of a download
_TEXT_ENDINGS: Final = (".json", ".txt")
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_FILE_NAME: Final = re.compile(r"[^/\\\0-\x1f]{1,200}")
_ENVIRONMENT: Final = {
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_XET": "1",  # plain HTTP, each read of which has a time limit
}
_MAX_REASON_LETTERS: Final = 300
_LOG_IN: Final = "log in with `hf auth login`, or set HF_TOKEN"

logger = logging.getLogger(__name__)


def download_from_hub(model: Published, folder: Path, with_weights: bool) -> str:
    """Download the model's files into `folder`; return their commit.

    Raises NotFetched, also for a file of another sum, and CheckpointError: its format cannot be served.
    """
    request = [model.repository, model.revision, str(folder), "weights" if with_weights else ""]
    size = f", {model.num_bytes / 1e6:.0f} MB" if with_weights and model.num_bytes else ""
    logger.info("fetching %s from %s on the hub%s", model.name, model.repository, size)
    process = subprocess.run(
        [sys.executable, "-m", __spec__.name, *request],
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    answer = json.loads(process.stdout or '{"refused": "the download has been ended"}')
    if "unsupported" in answer:
        raise CheckpointError(answer["unsupported"])
    if "refused" in answer:
        raise NotFetched(answer["refused"])
    for name, stated in answer["sums"].items():
        if not has_sum(folder / name, model.sha256.get(name, stated)):
            (folder / name).unlink()
            raise NotFetched(f"{name} of {model.repository} on the hub is not the file that was published")
    return str(answer["commit"])


def has_sum(path: Path, expected: str) -> bool:
    """Return whether the file has this sha256, or git's own sum, which the hub states for small files."""
    git_blob = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(git_blob)  # nosec B324
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected


# -- The process that downloads ------------------------------------------------------------------------------


def main(repository: str, revision: str, folder: str, with_weights: str) -> None:
    """Print the commit and each file's sum as JSON, or why there is none."""
    be_killed_with_the_parent()  # a signal that ends whoever asked for the download ends it, too
    from huggingface_hub import errors

    try:
        print(json.dumps(_download(repository, revision, Path(folder), bool(with_weights))))
    except CheckpointError as error:
        print(json.dumps({"unsupported": str(error)}))
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        print(json.dumps({"refused": f"the Hugging Face hub {_refusal(error, repository)}"}))
    except Exception as error:  # of connections, in the types of several libraries
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON_LETTERS]
        print(json.dumps({"refused": f"the Hugging Face hub cannot be reached ({reason})"}))


def _download(repository: str, revision: str, folder: Path, with_weights: bool) -> dict[str, Any]:
    from huggingface_hub import HfApi, hf_hub_download

    about = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=LIST_LIMIT_S)
    files = {file.rfilename: file for file in about.siblings or () if _FILE_NAME.fullmatch(file.rfilename)}
    if not _COMMIT.fullmatch(about.sha or ""):
        return {"refused": f"what answers as the Hugging Face hub has no commit of {repository}"}
    wanted = _wanted(repository, list(files), with_weights)
    for name in wanted:
        hf_hub_download(repository, name, revision=about.sha, local_dir=folder, etag_timeout=CONNECT_LIMIT_S)
    sums = {name: file.lfs.sha256 if file.lfs else file.blob_id for name, file in files.items()}
    return {"commit": about.sha, "sums": {name: sums[name] for name in wanted}}


def _wanted(repository: str, names: list[str], with_weights: bool) -> list[str]:
    """Choose the small files and one set of weights: repositories hold several formats."""
    if explanation := explain_listing(repository, names):
        raise CheckpointError(explanation)
    weights = set(_weights(names)) if with_weights else set()
    texts = {name for name in names if name.endswith(_TEXT_ENDINGS) and not name.startswith("model.")}
    return [name for name in names if name in weights | texts]


def _weights(names: list[str]) -> list[str]:
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names:
        return [INDEX, *(name for name in names if re.fullmatch(r"model-.*\.safetensors", name))]
    return [PICKLED] if PICKLED in names else [CTRANSLATE2]


def _refusal(error: Exception, repository: str) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    match error, status:
        case errors.GatedRepoError(), _:
            return f"gates {repository}: accept its terms on its page at the hub, then {_LOG_IN}"
        case errors.RepositoryNotFoundError() | errors.HFValidationError(), _:
            return f"has no model {repository}, or it is private: then {_LOG_IN}"
        case _, 401 | 429:
            return f"refuses {repository} ({status}): wait, or {_LOG_IN}"
        case _, 404:
            return f"has no such revision or file of {repository}"
        case _:
            return f"answers {status or error}: try again later"


if __name__ == "__main__":
    main(*sys.argv[1:])
