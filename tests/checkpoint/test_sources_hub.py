"""The hub asked for real: one of our own with the faults of others, one that is silent, and none."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import pytest
from huggingface_hub import constants

from asr_server.checkpoint import fetch, sources
from asr_server.checkpoint.fetch import own_cache
from asr_server.checkpoint.find import name_elsewhere, resolve_checkpoint, revision_of, tokenizer_of
from asr_server.config import EMBEDDED_MODEL
from asr_server.errors import CheckpointError
from tests.checkpoint.fake_hub import BLOCK_BYTES, COMMIT, FakeHub, running_hub

NOBODY = "http://127.0.0.1:9"  # the port of the discard service, which nobody runs
NAME = "someone/pocket"
WEIGHTS = "model.safetensors"
LONGEST_START_S = sources.ANSWER_LIMIT_S + sources.CONNECT_LIMIT_S


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that nobody runs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sources, "PAUSE_S", 0.01)
    monkeypatch.setattr(sources, "ANSWER_LIMIT_S", 60.0)  # other work may hold this machine up
    return tmp_path / "home"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub(EMBEDDED_MODEL) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def refusal(name: str = NAME) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def contents(folder: Path) -> dict[str, bytes]:
    """The model's files by their names."""
    others = ("complete", "README.md")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in others}


def test_a_model_is_fetched_whole_and_nobody_is_asked_twice(fake: FakeHub) -> None:
    directory = resolve_checkpoint(NAME)
    assert contents(directory) == contents(EMBEDDED_MODEL)
    assert (revision_of(directory), name_elsewhere(directory)) == (COMMIT, NAME)
    num_requests = len(fake.requests)
    assert num_requests == 1 + len(contents(directory))
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


def test_a_download_that_breaks_off_goes_on_where_it_ended(fake: FakeHub) -> None:
    fake.cut_after[WEIGHTS] = [3 * BLOCK_BYTES, 7 * BLOCK_BYTES]
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)
    asked = [request for request in fake.requests if WEIGHTS in request]
    assert [request.partition(" from ")[2] for request in asked] == [
        "",
        str(3 * BLOCK_BYTES),
        str(7 * BLOCK_BYTES),
    ]


def test_a_server_that_ignores_ranges_sends_the_whole_file_again(fake: FakeHub) -> None:
    fake.ignores_ranges = True
    fake.cut_after[WEIGHTS] = [3 * BLOCK_BYTES]
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


def test_what_has_arrived_is_kept_for_the_next_call(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.cut_after[WEIGHTS] = [3 * BLOCK_BYTES] * (1 + sources.TRIES)
    message = refusal()
    assert f"the download of {WEIGHTS} broke off (" in message
    assert "what has arrived is kept: try again" in message
    fake.cut_after.clear()
    fake.requests.clear()
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)
    asked = f"/{NAME}/resolve/{COMMIT}/{WEIGHTS} from {3 * BLOCK_BYTES}"
    assert [request for request in fake.requests if WEIGHTS in request] == [asked]
    assert not any("/config.json" in request for request in fake.requests), "what came before it is here"


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_damaged_file_is_not_used_nor_kept(fake: FakeHub, name: str) -> None:
    fake.damaged = {name}
    assert f"{name} arrived damaged from the hub" in refusal()
    assert not any(name in path.name for path in (own_cache() / "models").rglob("*"))
    fake.damaged = set()
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


def test_weights_that_are_not_the_published_ones_are_refused_before_they_are_fetched(fake: FakeHub) -> None:
    assert (
        "model.safetensors of openai/whisper-tiny on the hub is not the file that was published"
        in refusal("tiny")
    )
    assert len(fake.requests) == 1
    assert fake.requests[0].endswith("/revision/169d4a4341b33bc18d8881c4b69c2e104e1cc0af")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "", "does not know you (401) for someone/pocket: log in with `hf auth login`"),
        (401, "RepoNotFound", "has no model someone/pocket, or it is private: then log in"),
        (403, "GatedRepo", "someone/pocket is gated (403): accept its terms"),
        (404, "RepoNotFound", "has no model someone/pocket, or it is private"),
        (404, "RevisionNotFound", "has no such revision or file of someone/pocket (RevisionNotFound)"),
        (429, "", "has had too many requests from here (429): wait, or log in"),
        (503, "", "answers 503 Service Unavailable: try again later"),
    ],
)
def test_what_the_hub_refuses_is_said_as_what_it_is(fake: FakeHub, status: int, code: str, said: str) -> None:
    fake.status, fake.error_code = status, code
    message = refusal()
    assert said in message
    assert "cannot be reached" not in message


def test_a_hub_that_cannot_be_reached_is_said_with_the_way_without_it() -> None:
    message = refusal("large-v3")
    assert message.startswith("the Hugging Face hub cannot be reached (")
    assert "run `asr-server models fetch large-v3` and copy the folder" in message


def test_a_silent_hub_is_waited_for_once_and_not_long(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LONGEST_START_S <= 10
    monkeypatch.setattr(sources, "ANSWER_LIMIT_S", 0.5)
    fake.silent = threading.Event()
    started_s = time.monotonic()
    assert "cannot be reached (no answer within 0.5 s)" in refusal()
    assert time.monotonic() - started_s >= 0.5
    assert len(fake.requests) == 1


def test_a_host_of_files_that_cannot_be_reached_is_tried_once(fake: FakeHub) -> None:
    fake.files_at = NOBODY
    assert "the download of added_tokens.json broke off (" in refusal()
    assert len(fake.requests) == 2


def test_nobody_is_asked_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal("base").startswith(
        "base is not here, and HF_HUB_OFFLINE says to stay offline. Where there"
    )
    assert fake.requests == []


def changed_listing(fake: FakeHub, name: str, **changes: object) -> dict[str, object]:
    """What the hub lists, with other values of one file."""
    listing = fake.listing()
    siblings = listing["siblings"]
    assert isinstance(siblings, list)
    (about,) = [each for each in siblings if each["rfilename"] == name]
    about |= changes
    return listing


def test_what_answers_in_the_hub_s_place_is_told_apart(fake: FakeHub) -> None:
    fake.says = ["a login page"]
    assert "what answers as the Hugging Face hub is something else" in refusal()


def test_a_file_that_is_longer_than_it_states_is_not_taken_to_its_end(fake: FakeHub) -> None:
    fake.sends_more = 100_000_000
    fake.pause_s = 0.0001
    assert "added_tokens.json on the hub is larger than the " in refusal()
    kept = [path.stat().st_size for path in (own_cache() / "models").rglob("*") if path.is_file()]
    assert sum(kept) == 0


def test_nothing_is_kept_of_a_file_that_turns_out_longer_than_it_states(fake: FakeHub) -> None:
    fake.says = changed_listing(fake, WEIGHTS, size=3 * BLOCK_BYTES)
    assert f"{WEIGHTS} on the hub is larger than the {3 * BLOCK_BYTES} bytes that it states" in refusal()
    kept = {path.name: path.stat().st_size for path in (own_cache() / "models").glob(f"*/{WEIGHTS}*")}
    assert [*kept.values()] == [0]


def test_a_list_without_end_is_not_read_to_its_end(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LIST_BYTES", 10_000)
    fake.says = {"sha": COMMIT, "siblings": [], "more": "x" * 100_000}
    assert f"the list of {NAME} on the hub is longer than 10000 bytes" in refusal()


@pytest.mark.parametrize(
    "commit", ["../../../../outside", COMMIT[:-1], COMMIT.upper(), f"{COMMIT}/..", 3, None]
)
def test_a_commit_that_is_none_becomes_no_path(fake: FakeHub, home: Path, commit: object) -> None:
    fake.says = fake.listing() | {"sha": commit}
    assert "what answers as the Hugging Face hub is something else" in refusal()
    assert len(fake.requests) == 1
    assert [path.name for path in (own_cache() / "models").glob("*@*")] == [
        f"{NAME.replace('/', '--')}@main.partial"
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"blobId": "../../../outside"},
        {"size": None},
        {"size": -1},
        {"size": "12"},
        {"rfilename": "a\\b.json"},
        {"rfilename": "x" * 300},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_list_that_lies_is_refused_before_anything_is_fetched(
    fake: FakeHub, change: dict[str, object]
) -> None:
    fake.says = changed_listing(fake, "added_tokens.json", **change)
    assert "what answers as the Hugging Face hub is something else" in refusal()
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rfilename": "x" * 201}, f"'{'x' * 80}' is not of the form"),
        ({"size": "9" * 200}, f"a size that is none: {'9' * 80}')"),
    ],
)
def test_what_is_wrong_in_a_list_is_told_in_part(fake: FakeHub, change: dict[str, object], told: str) -> None:
    fake.says = changed_listing(fake, WEIGHTS, **change)
    assert told in refusal()


def test_a_server_that_breaks_off_before_the_first_byte_is_asked_again(fake: FakeHub) -> None:
    fake.cut_after[WEIGHTS] = [0]
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


def test_a_download_of_a_byte_at_a_time_ends(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_TRIES", 5)
    monkeypatch.setattr(sources, "PAUSE_S", 0.0)
    fake.cut_after[WEIGHTS] = list(range(1, 50))
    assert f"the download of {WEIGHTS} broke off (" in refusal()
    assert len([request for request in fake.requests if WEIGHTS in request]) == 5


def test_a_repository_of_another_kind_is_refused_before_anything_is_fetched(
    fake: FakeHub, tmp_path: Path
) -> None:
    fake.folder = tmp_path / "mlx"
    fake.folder.mkdir()
    (fake.folder / "weights.npz").touch()
    (fake.folder / "config.json").write_text("{}")
    assert "is an MLX model. Use the model that it was made from: tiny" in refusal("x/whisper-tiny-mlx")
    assert len(fake.requests) == 1


@pytest.mark.slow
def test_two_processes_fetch_a_model_once(fake: FakeHub, home: Path) -> None:
    fake.pause_s = 0.005
    code = "import sys; from asr_server.checkpoint.find import resolve_checkpoint as r; print(r(sys.argv[1]))"
    environment = os.environ | {"HF_ENDPOINT": fake.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
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


def test_a_lock_that_somebody_keeps_is_not_waited_for_without_end(
    fake: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LOCK_SILENCE_LIMIT_S", 0.3)
    with held_lock(home) as lock:
        message = refusal()
        assert f"another process has held {lock.name} for 0.3 s in which nothing arrived" in message
        assert Path(lock.name).stat().st_mode & 0o777 == 0o600, "nobody else may take it"
    assert fake.requests == []
    assert contents(resolve_checkpoint(NAME)) == contents(EMBEDDED_MODEL)


@pytest.mark.slow
def test_a_lock_is_waited_for_as_long_as_something_arrives(
    fake: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LOCK_SILENCE_LIMIT_S", 1.5)
    with held_lock(home) as lock, ThreadPoolExecutor(1) as pool:
        partial = Path(lock.name).parent / f"{NAME.replace('/', '--')}@main.partial"
        partial.mkdir()
        waiting = pool.submit(resolve_checkpoint, NAME)
        for place in range(6):  # twice the limit in all
            (partial / f"{place}.part").touch()
            assert not wait([waiting], timeout=0.5).done
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert contents(waiting.result()) == contents(EMBEDDED_MODEL)


# -- The Hugging Face cache ----------------------------------------------------------------------------------


def snapshot(home: Path, repository: str, commit: str) -> Path:
    """Where huggingface_hub keeps that commit of the repository."""
    return home / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / commit


def test_what_lies_in_the_hugging_face_cache_serves_without_a_question(home: Path) -> None:
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
