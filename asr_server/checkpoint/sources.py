"""Download a published model from the Hugging Face hub.

Own requests with own limits: huggingface_hub retries for too long and checks no sums. It supplies
endpoint and token. Progress is a bar on a terminal, else log lines. Blocks: never call it on an event
loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote

from asr_server.checkpoint.files import CTRANSLATE2, INDEX, PICKLED, SINGLE
from asr_server.checkpoint.foreign import explain_listing
from asr_server.checkpoint.names import Published
from asr_server.errors import CheckpointError, NotFetched
from asr_server.machine import in_daemon_thread

if TYPE_CHECKING:
    import httpx2


logger = logging.getLogger(__name__)

# A start waits 10 s at most where a host cannot be reached: for the hub, and then for the host of its files
# or for the package index.
ANSWER_LIMIT_S: Final = 5.0  # for the list of files, connecting included
CONNECT_LIMIT_S: Final = 4.0  # to who has the files
SILENCE_LIMIT_S: Final = 20.0  # without a byte of a file
TRIES: Final = 4  # one after another without a byte more
UNFINISHED: Final = ".part"
PAUSE_S: Final = 0.5  # twice that before the second try, and doubled each time
_SECONDS_BETWEEN_LINES: Final = 10.0  # of progress in the log
MAX_LIST_BYTES: Final = 8 << 20
MAX_TRIES: Final = 100  # in all: a server might send a byte each time
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_SUM: Final = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_FILE_NAME: Final = re.compile(r"[^/\\\0-\x1f]{1,200}")
_TEXT_ENDINGS: Final = (".json", ".txt")
_LOG_IN: Final = "log in with `hf auth login`, or set HF_TOKEN"


class DownloadProgress:
    def __init__(self, what: str, num_bytes: int) -> None:
        self._what, self._num_bytes = what, num_bytes
        self._done = 0
        self._bar: Any = None
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._what, total=self._num_bytes or None)
            self._bar.start()
        else:
            size = f", {_in_mb(self._num_bytes)}" if self._num_bytes else ""
            logger.info("fetching %s%s", self._what, size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def reached(self, num_bytes: int) -> None:
        self._done = num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=num_bytes)
        elif time.monotonic() - self._last_line_s >= _SECONDS_BETWEEN_LINES:
            self._last_line_s = time.monotonic()
            logger.info("%s: %s of %s", self._what, _in_mb(self._done), _in_mb(self._num_bytes))

    def add(self, num_bytes: int) -> None:
        self.reached(self._done + num_bytes)


def _in_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def has_sum(path: Path, expected: str) -> bool:
    is_sha256 = len(expected) == 64
    git_blob = b"blob %d\0" % path.stat().st_size
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(git_blob)  # nosec B324 # the hub has no other
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest() == expected


class _File(NamedTuple):
    name: str
    num_bytes: int
    sum: str  # sha256, or git's own of a small file


def download_from_hub(model: Published, folder: Path, with_weights: bool) -> str:
    """Download the model's files into `folder`; return their commit.

    Raises:
        NotFetched: the hub is unreachable, refuses, lacks the model, or the download broke off.
        CheckpointError: its format cannot be served.
    """
    import httpx2
    from huggingface_hub import constants, get_token

    token = get_token()
    headers = {"Accept-Encoding": "identity"}  # else few bytes might become many
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    timeout = httpx2.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S)
    with httpx2.Client(
        base_url=constants.ENDPOINT, headers=headers, timeout=timeout, follow_redirects=True
    ) as client:
        commit, listed = _list_files(client, model)
        wanted = _wanted(model, listed, with_weights)
        with DownloadProgress(
            f"{model.name} from {model.repository} on the hub", sum(file.num_bytes for file in wanted)
        ) as progress:
            for file in wanted:
                url = f"/{model.repository}/resolve/{commit}/{quote(file.name)}"
                _download(client, url, file, folder, progress)
    return commit


def _list_files(client: httpx2.Client, model: Published) -> tuple[str, list[_File]]:
    url = f"/api/models/{model.repository}/revision/{quote(model.revision, safe='')}"
    asked = in_daemon_thread(lambda: _read_list(client, url, model.repository), "hub")
    try:  # with a limit of ours: a name's look-up may take longer than any timeout of the client
        body = asked.result(ANSWER_LIMIT_S)
    except NotFetched:
        raise
    except Exception as error:
        silence = f"no answer within {ANSWER_LIMIT_S:g} s"
        reason = (str(error) or type(error).__name__) if asked.done() else silence
        raise NotFetched(f"the Hugging Face hub cannot be reached ({reason})") from error
    try:
        content = json.loads(body)
        files = [_described(model, about) for about in content["siblings"] if "/" not in about["rfilename"]]
        return _checked(_COMMIT, content["sha"]), files
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = repr(error)[:200]
        raise NotFetched(f"what answers as the Hugging Face hub is something else ({reason})") from error


def _read_list(client: httpx2.Client, url: str, repository: str) -> bytes:
    body = bytearray()
    with client.stream("GET", url, params={"blobs": "true"}) as answer:
        _check_status(answer, repository)
        for block in answer.iter_raw():
            body += block
            if len(body) > MAX_LIST_BYTES:
                raise NotFetched(f"the list of {repository} on the hub is longer than {MAX_LIST_BYTES} bytes")
    return bytes(body)


def _checked(pattern: re.Pattern[str], value: Any) -> str:
    if type(value) is not str or not pattern.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is not of the form {pattern.pattern}")
    return value


def _described(model: Published, about: Mapping[str, Any]) -> _File:
    name = _checked(_FILE_NAME, about["rfilename"])
    stated = _checked(_SUM, (about.get("lfs") or {}).get("sha256") or about["blobId"])
    known = model.sha256.get(name, stated)
    if len(known) == len(stated) and known != stated:
        raise NotFetched(f"{name} of {model.repository} on the hub is not the file that was published")
    num_bytes = about["size"]
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"a size that is none: {str(num_bytes)[:80]}")
    return _File(name, num_bytes, known)


def _wanted(model: Published, listed: list[_File], with_weights: bool) -> list[_File]:
    names = [file.name for file in listed]
    if explanation := explain_listing(model.repository, names):
        raise CheckpointError(explanation)
    weights = set(_weights(names)) if with_weights else set()
    return [
        file
        for file in listed
        if file.name in weights or (file.name.endswith(_TEXT_ENDINGS) and not file.name.startswith("model."))
    ]


def _weights(names: list[str]) -> list[str]:
    """Choose one set of weights: repositories hold several formats."""
    if SINGLE in names:
        return [SINGLE]
    if INDEX in names:
        return [INDEX, *(name for name in names if re.fullmatch(r"model-.*\.safetensors", name))]
    return [PICKLED] if PICKLED in names else [CTRANSLATE2]


def _download(client: httpx2.Client, url: str, file: _File, folder: Path, progress: DownloadProgress) -> None:
    """Continue an earlier download. Delete a file with a wrong sum."""
    import httpx2

    target, part = folder / file.name, folder / f"{file.name}.{file.sum[:12]}{UNFINISHED}"
    if target.exists() and has_sum(target, file.sum):
        progress.add(target.stat().st_size)
        return
    part.touch()
    progress.add(part.stat().st_size)
    at_first, failures, num_tries = part.stat().st_size, 0, 0
    while part.stat().st_size < file.num_bytes:
        before, num_tries = part.stat().st_size, num_tries + 1
        try:
            _download_rest(client, url, file, part, progress)
            break
        except httpx2.TransportError as error:
            failures = 1 if part.stat().st_size > before else failures + 1
            is_unreached = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            is_first_failure = is_unreached and part.stat().st_size == at_first
            if failures == TRIES or num_tries == MAX_TRIES or is_first_failure:
                reason = str(error) or type(error).__name__
                raise NotFetched(
                    f"the download of {file.name} broke off ({reason}); what has arrived is kept: try again"
                ) from error
            time.sleep(PAUSE_S * 2**failures)
    if not has_sum(part, file.sum):
        part.unlink()
        raise NotFetched(f"{file.name} arrived damaged from the hub (its sum is another one): try again")
    part.rename(target)


def _download_rest(
    client: httpx2.Client, url: str, file: _File, part: Path, progress: DownloadProgress
) -> None:
    have = part.stat().st_size
    headers = {"Range": f"bytes={have}-"} if have else {}
    with client.stream("GET", url, headers=headers) as answer, part.open("ab") as output:
        _check_status(answer, file.name)
        if answer.status_code != 206 and have:
            output.truncate(0)
            output.seek(0)
            progress.add(-have)
        for block in answer.iter_raw():
            if output.tell() + len(block) > file.num_bytes:
                output.truncate(0)
                raise NotFetched(
                    f"{file.name} on the hub is larger than the {file.num_bytes} bytes that it states"
                )
            output.write(block)
            progress.add(len(block))


def _check_status(answer: httpx2.Response, what: str) -> None:
    match answer.status_code, answer.headers.get("X-Error-Code", ""):
        case status, _ if status < 400:
            return
        case (403 as status, _) | (status, "GatedRepo"):
            said = f"is gated ({status}): accept its terms on its page at the hub, then {_LOG_IN}"
            raise NotFetched(f"{what} {said}")
        case (_, "RepoNotFound") | (404, ""):
            said = f"has no model {what}, or it is private: then {_LOG_IN}"
        case 404, code:
            said = f"has no such revision or file of {what} ({code})"
        case 401, _:
            said = f"does not know you (401) for {what}: {_LOG_IN}"
        case 429, _:
            said = f"has had too many requests from here (429): wait, or {_LOG_IN}"
        case status, _:
            said = f"answers {status} {answer.reason_phrase}: try again later"
    raise NotFetched(f"the Hugging Face hub {said}")
