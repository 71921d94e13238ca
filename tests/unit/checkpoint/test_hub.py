"""The hub asked for real: one of our own with the faults of others, one that is silent, and none."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import pytest
from huggingface_hub import constants

from asr_server.annexes.model_sources import find
from asr_server.annexes.model_sources.find import resolve_checkpoint, tokenizer_of
from asr_server.checkpoint.files import name_elsewhere, own_cache, revision_of, source_of
from asr_server.checkpoint.tensors import find_weights
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from tests.support.checkpoints import pocket_directory
from tests.unit.checkpoint.fake_hub import BLOCK_BYTES, COMMIT, FakeHub, running_hub
from tests.unit.checkpoint.foreign_models import write_ctranslate2

pytestmark = pytest.mark.slow  # each download is a process

NOBODY = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs
NAME = "someone/pocket"
WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that nobody runs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "home"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(EMBEDDED_MODEL) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def refusal(name: str = NAME) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    """The model's files by their names."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def test_a_model_is_fetched_whole_and_nobody_is_asked_twice(fake: FakeHub) -> None:
    directory = resolve_checkpoint(NAME)
    assert contents(directory) == contents(EMBEDDED_MODEL)
    assert (revision_of(directory), name_elsewhere(directory)) == (COMMIT, NAME)
    num_requests = len(fake.requests)
    assert resolve_checkpoint(NAME) == directory
    assert len(fake.requests) == num_requests


def test_only_one_set_of_weights_is_fetched(tmp_path: Path, fake: FakeHub) -> None:
    fake.folder = shutil.copytree(EMBEDDED_MODEL, tmp_path / "repository")
    for name in ("pytorch_model.bin", "tf_model.h5", "model.fp32-00001-of-00002.safetensors", "model.bin"):
        (fake.folder / name).write_bytes(b"the same again")
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


def test_the_tokenizer_alone_needs_no_weights(fake: FakeHub) -> None:
    texts = tokenizer_of(NAME)
    assert "tokenizer.json" in contents(texts)
    assert not any(WEIGHTS in request for request in fake.requests)
    assert (resolve_checkpoint(NAME) / WEIGHTS).exists()


def test_a_download_that_breaks_off_is_tried_again(fake: FakeHub) -> None:
    fake.cut_after[WEIGHTS] = [3 * BLOCK_BYTES]
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


@pytest.mark.parametrize("name", [WEIGHTS, pytest.param("tokenizer.json", marks=pytest.mark.trial)])
def test_a_file_with_another_sum_is_not_used_nor_kept(fake: FakeHub, name: str) -> None:
    fake.damaged = {name}
    assert f"{name} of {NAME} on the hub is not the file that was published" in refusal()
    assert not any(path.name == name for path in (own_cache() / "models").rglob("*"))
    fake.damaged = set()
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


def test_weights_that_are_not_the_published_ones_are_refused(fake: FakeHub) -> None:
    assert f"{WEIGHTS} of openai/whisper-tiny on the hub is not the file that was published" in refusal(
        "tiny"
    )
    assert any(
        request.endswith("/revision/169d4a4341b33bc18d8881c4b69c2e104e1cc0af") for request in fake.requests
    )


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "RepoNotFound", "has no model someone/pocket, or it is private: then log in"),
        (429, "", "refuses someone/pocket (429): wait, or log in"),
        *(
            pytest.param(*each, marks=pytest.mark.trial)
            for each in (
                (403, "GatedRepo", "gates someone/pocket: accept its terms"),
                (404, "RevisionNotFound", "has no such revision or file of someone/pocket"),
                (501, "", "answers 501: try again later"),
            )
        ),
    ],
)
def test_a_refusal_of_the_hub_names_its_reason(fake: FakeHub, status: int, code: str, said: str) -> None:
    fake.status, fake.error_code = status, code
    message = refusal()
    assert said in message
    assert "cannot be reached" not in message


def test_the_error_of_a_hub_out_of_reach_names_the_way_without_it() -> None:
    message = refusal("large-v3")
    assert message.startswith("the Hugging Face hub cannot be reached (")
    assert "run `asr-server models fetch large-v3` and copy the folder" in message


def test_a_silent_hub_is_left_after_its_limit(fake: FakeHub) -> None:
    fake.silent = threading.Event()
    assert "cannot be reached (ReadTimeout: " in refusal()


def test_nobody_is_asked_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal("base").startswith(
        "base is not here, and HF_HUB_OFFLINE says to stay offline. Where there"
    )
    assert fake.requests == []


@pytest.mark.parametrize("listing", [["a login page"], {"sha": "../../outside", "siblings": []}])
def test_another_service_in_the_place_of_the_hub_gives_a_plain_error(fake: FakeHub, listing: object) -> None:
    fake.says = listing
    assert "Hugging Face hub" in refusal()
    assert [path.name for path in (own_cache() / "models").glob("*@*")] == [
        f"{NAME.replace('/', '--')}@main.partial"
    ]


def test_a_repository_of_another_kind_is_refused_before_a_download(fake: FakeHub, tmp_path: Path) -> None:
    fake.folder = tmp_path / "mlx"
    fake.folder.mkdir()
    (fake.folder / "weights.npz").touch()
    (fake.folder / "config.json").write_text("{}")
    assert "is an MLX model. Use the model that it was made from: tiny" in refusal("x/whisper-tiny-mlx")
    assert len(fake.requests) == 1


def test_two_processes_fetch_a_model_once(fake: FakeHub, home: Path) -> None:
    fake.pause_s = 0.005
    code = f"import sys; from {find.__name__} import *; print(resolve_checkpoint(sys.argv[1]))"
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, NAME], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in both}
    assert said == {str(resolve_checkpoint(NAME))}
    assert len(fake.requests) == len(set(fake.requests)), "a file was fetched twice"


def held_lock(home: Path) -> BinaryIO:
    """The lock of the model, held by somebody else who left it open for all to read."""
    lock = home / "asr-server" / "models" / f"{NAME.replace('/', '--')}.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    lock.chmod(0o644)
    file = lock.open("rb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def test_a_lock_is_waited_for_and_nobody_else_may_take_it_from_then_on(fake: FakeHub, home: Path) -> None:
    with held_lock(home) as lock, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(resolve_checkpoint, NAME)
        is_done = bool(wait([waiting], timeout=0.5).done)
        fcntl.flock(lock, fcntl.LOCK_UN)  # before what may fail: the pool's end waits for its thread
        assert not is_done
        assert contents(waiting.result()) == contents(EMBEDDED_MODEL)
        assert Path(lock.name).stat().st_mode & 0o777 == 0o600


# -- The Hugging Face cache ----------------------------------------------------------------------------------


def snapshot(home: Path, repository: str, commit: str) -> Path:
    """Where huggingface_hub keeps that commit of the repository."""
    return home / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def test_a_copy_in_the_hugging_face_cache_serves_without_a_question(home: Path) -> None:
    kept = shutil.copytree(EMBEDDED_MODEL, snapshot(home, "openai/whisper-small", "0" * 40))
    assert resolve_checkpoint("small") == kept
    assert (revision_of(kept), name_elsewhere(kept)) == ("0" * 40, "openai/whisper-small")


def test_the_newest_complete_snapshot_serves(home: Path) -> None:
    whole = shutil.copytree(EMBEDDED_MODEL, snapshot(home, "someone/mine", "a" * 40))
    cut = shutil.copytree(EMBEDDED_MODEL, snapshot(home, "someone/mine", "b" * 40))
    (cut / WEIGHTS).write_bytes((cut / WEIGHTS).read_bytes()[:1000])
    refs = cut.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("b" * 40)
    assert resolve_checkpoint("someone/mine") == whole
    shutil.copy(whole / WEIGHTS, cut / WEIGHTS)
    assert resolve_checkpoint("someone/mine") == cut


# -- CTranslate2's models, as its own converter writes them --------------------------------------------------


def test_a_ctranslate2_repository_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(write_ctranslate2(pocket_directory(), tmp_path / "ct2", "float16")) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        directory = resolve_checkpoint("Systran/faster-whisper-small")
        assert contents(source_of(directory)) == contents(hub.folder)
    assert (revision_of(directory), name_elsewhere(directory)) == (COMMIT, "Systran/faster-whisper-small")


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("small", "Systran/faster-whisper-small"),
        ("distil-large-v3", "Systran/faster-distil-whisper-large-v3"),
        ("turbo", "mobiuslabsgmbh/faster-whisper-large-v3-turbo"),
        ("Systran/faster-whisper-medium", "Systran/faster-whisper-medium"),
    ],
)
def test_a_copy_of_faster_whisper_serves_too(home: Path, name: str, repository: str) -> None:
    kept = write_ctranslate2(pocket_directory(), snapshot(home, repository, "1" * 40), "int8")
    directory = resolve_checkpoint(name)
    assert source_of(directory) == kept
    assert [file.path for file in find_weights(directory)] == [kept / "model.bin"]
    assert (revision_of(directory), name_elsewhere(directory)) == ("1" * 40, repository)
