"""Checkpoints of an author who is not trusted: each is refused in one line, within 10 s and 200 MB."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asr_server.annexes.model_sources import readers
from asr_server.annexes.model_sources.readers import read_openai
from asr_server.errors import CheckpointError
from asr_server.model.weights import read_weights
from tests.unit.checkpoint.binary_models import ctranslate2, ggml, variable

# Resolves one checkpoint a line in a child of its own, which is ended after 10 s or has no more than 200 MB.
SERVER = """
import json, os, resource, signal, sys
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.checkpoint.tokenizer import Tokenizer

for line in sys.stdin:
    if (child := os.fork()) == 0:
        signal.alarm(10)
        now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 200_000_000,) * 2)
        try:
            Tokenizer.from_directory(resolve_checkpoint(line.strip()))
            answer = "taken"
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(1, (json.dumps(answer) + chr(10)).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        os.write(1, (json.dumps(f"ended by {status}") + chr(10)).encode())
"""
Refuse = Callable[[Path], str]


@pytest.fixture(scope="module")
def refusal() -> Iterator[Refuse]:
    """The message by which a checkpoint is refused."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def refused(path: Path) -> str:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{path}\n")
            server.stdin.flush()
            kind, _, message = json.loads(server.stdout.readline()).partition(": ")
            assert kind == "CheckpointError", (kind, message)
            assert "\n" not in message
            assert len(message) < 600
            return str(message)

        yield refused
        server.stdin.close()


# -- Small files ---------------------------------------------------------------------------------------------

JSON_FILES = ("config.json", "tokenizer.json", "generation_config.json", "preprocessor_config.json")


@pytest.mark.parametrize("name", [*JSON_FILES, "model.safetensors"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"]
)
def test_a_pipe_is_not_waited_for_and_a_device_not_read(
    refusal: Refuse, directory: Path, name: str, make: Callable[[Path], None]
) -> None:
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    assert refusal(directory) == f"{directory / name} is no regular file"


def test_a_pipe_as_merges_is_not_waited_for(refusal: Refuse, directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "merges.txt").unlink()
    os.mkfifo(directory / "merges.txt")
    assert "merges.txt is no regular file" in refusal(directory)


@pytest.mark.parametrize(
    ("begin", "more", "times"),
    [
        *(("", "[", 1_000_000), ("", '{"a":', 1_000_000), ("", "1", 5000), ("", " ", 7 << 20)),
        ("[", "{},", (6 << 20) // 3 - 1),
    ],
)
def test_json_that_costs_more_than_its_length_is_refused(
    refusal: Refuse, directory: Path, begin: str, more: str, times: int
) -> None:
    (directory / "generation_config.json").write_text(begin + more * times)
    assert "generation_config.json" in refusal(directory)


@pytest.mark.parametrize(
    "places", [["a"], {}, {"a": 1}, {"a": "../model.safetensors"}, {"a": "/dev/zero"}, None]
)
def test_an_index_names_files_beside_it(refusal: Refuse, directory: Path, places: object) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": places}))
    assert refusal(directory) == f"weight_map in {path} must name .safetensors files beside it"


@pytest.mark.parametrize(
    "note", [{}, {"path": 3}, {"path": "/dev/zero", "num_bytes": 0, "modified_ns": 0, "tensors": {}}]
)
def test_a_note_of_another_author_is_checked(refusal: Refuse, directory: Path, note: object) -> None:
    (directory / "stored_tensors.json").write_text(json.dumps(note))
    assert "is damaged" in (message := refusal(directory)) or "is no regular file" in message


# -- safetensors ---------------------------------------------------------------------------------------------


def write_safetensors(directory: Path, header: object, length: int | None = None) -> None:
    content = json.dumps(header).encode()
    number = struct.pack("<Q", len(content) if length is None else length)
    (directory / "model.safetensors").write_bytes(number + content + bytes(8))


def tensor(
    first: object = 0, end: object = 8, shape: object = (2,), dtype: object = "F32"
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": tensor(0.0, 8.0)},
        {"a": tensor(-8, 0)},
        {"a": tensor(0, 9)},
        {"a": tensor(shape=[2.0])},
        {"a": tensor(shape=[-1, -2])},
        {"a": tensor(shape="2")},
        {"a": tensor(shape=[1] * 100_000)},
        {"a": tensor(shape=[10**4000, 10**4000])},
        {"a": tensor(dtype=["F32"])},
        {"a": tensor(dtype="F4")},
        {"a": tensor(0, 8), "b": tensor(4, 12)},
        {"a": {"dtype": "F32"}},
        {"a": 3},
        [],
    ],
)
def test_a_header_that_lies_is_refused(refusal: Refuse, directory: Path, header: object) -> None:
    write_safetensors(directory, header)
    assert "model.safetensors is cut short, or is no safetensors file" in refusal(directory)


def test_a_header_longer_than_its_file_is_refused(refusal: Refuse, directory: Path) -> None:
    write_safetensors(directory, {}, length=(1 << 64) - 1)
    assert "is cut short" in refusal(directory)


def test_a_long_header_of_a_long_file_is_not_read(refusal: Refuse, directory: Path) -> None:
    write_safetensors(directory, {}, length=1 << 33)
    os.truncate(directory / "model.safetensors", 1 << 34)  # without a block on the disk
    assert "model.safetensors is larger than" in refusal(directory)


def test_millions_of_layers_are_not_counted_out(refusal: Refuse, directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"decoder_layers": 3_000_000}
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory, {"model.decoder.layers.2999999.fc1.weight": tensor()})
    assert "decoder_layers is 3000000" in refusal(directory) or "encoder_layers" in refusal(directory)


# -- CTranslate2 ---------------------------------------------------------------------------------------------


def ctranslate2_folder(tmp_path: Path, body: bytes, count: int) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "vocabulary.txt").write_text("")
    (tmp_path / "model.bin").write_bytes(ctranslate2(body, count))
    return tmp_path


CTRANSLATE2 = {
    "nothing behind the number of tensors": lambda: (b"", 4_000_000_000),
    "millions of tensors": lambda: (variable("a", (0,)) * 2_000_000, 2_000_000),
    "a weight that is one number": lambda: (variable("encoder/conv1/weight", (), bytes(4)) + bytes(4), 1),
    "sizes beyond the file": lambda: (variable("encoder/conv1/weight", (1 << 31,) * 8), 1),
    "a scale that fits no row": lambda: (
        variable("encoder/conv1/weight", (2,), bytes(2), 1)
        + variable("encoder/conv1/weight_scale", (1,), bytes(4))
        + bytes(4),
        2,
    ),
    "nothing behind the number of second names": lambda: (
        variable("a", (1,), bytes(4)) + struct.pack("<I", 4_000_000_000),
        1,
    ),
}


@pytest.mark.parametrize("content", CTRANSLATE2.values(), ids=CTRANSLATE2.keys())
def test_a_ctranslate2_file_that_lies_is_refused(
    refusal: Refuse, tmp_path: Path, content: Callable[[], tuple[bytes, int]]
) -> None:
    assert "model.bin" in refusal(ctranslate2_folder(tmp_path, *content()))


# -- whisper.cpp ---------------------------------------------------------------------------------------------

GGML = {
    "words that lead back": lambda: ggml(0, 0, 2_000_000_000, *[-4] * 10),
    "filters that lead back": lambda: ggml(-1, 1, 2_000_000_000, -4),
    "millions of words": lambda: ggml(0, 0, 2_000_000_000) + bytes(8_000_000),
    "millions of tensors": lambda: (
        ggml(0, 0, 0, 1, 1, 0, 0) + b"a" + struct.pack("<4i", 1, 1, 0, 0) * 2_000_000
    ),
    "negative sizes": lambda: ggml(0, 0, 0, 2, 1, 0, -1, -1) + b"a" + bytes(100),
    "sizes beyond the file": lambda: ggml(0, 0, 0, 8, 1, 0, *[1 << 30] * 8) + b"a" + bytes(100),
}


@pytest.mark.parametrize("content", GGML.values(), ids=GGML.keys())
def test_a_lying_ggml_file_is_refused(refusal: Refuse, tmp_path: Path, content: Callable[[], bytes]) -> None:
    path = tmp_path / "ggml-x.bin"
    path.write_bytes(content())
    assert refusal(path) == f"{path} is cut short or damaged: fetch it again"


# -- openai-whisper ------------------------------------------------------------------------------------------


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as members:
        members.writestr("x/data.pkl", pickled)
    return content.getvalue()


OPENAI = {
    "a description of 400 MB in 400 kB": lambda: archive(bytes(400_000_000), zipfile.ZIP_DEFLATED),
    "a long description": lambda: archive(b"]" * 8_000_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("content", OPENAI.values(), ids=OPENAI.keys())
def test_a_file_of_openai_whisper_that_lies_is_refused(
    refusal: Refuse, tmp_path: Path, content: Callable[[], bytes]
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content())
    assert refusal(path) == f"{path} is cut short or damaged: fetch it again"


def test_pickled_weights_that_are_compressed_are_refused_before_torch_reads_them(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(archive(bytes(4_000_000), zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="cut short or damaged"):
        read_weights(directory)


DIMS = {"n_audio_head": 2, "n_text_head": 3, "n_audio_layer": 4, "n_text_layer": 5, "n_mels": 80}
ROWS = torch.arange(24.0).view(6, 4)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        {"weights": {"a": ROWS}},
        {"dims": DIMS | {"n_audio_head": "x"}, "model_state_dict": {"a": ROWS}},
        *(
            pytest.param(content, marks=pytest.mark.trial)
            for content in (
                {"dims": DIMS, "model_state_dict": {"a": "no tensor"}},
                {"dims": [], "model_state_dict": {"a": ROWS}},
                [ROWS],
            )
        ),
    ],
)
def test_another_programs_file_is_refused_in_a_line(tmp_path: Path, content: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"^.*x\.pt is no checkpoint of openai-whisper, or it is damaged$"
    ):
        read_openai(save(tmp_path / "x.pt", content))


@pytest.mark.slow
def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"dims": DIMS, "model_state_dict": {"a": Trap(tmp_path / "sprung")}})
    with pytest.raises(CheckpointError, match="is no checkpoint of openai-whisper"):
        read_openai(path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.slow
def test_a_file_that_is_read_for_ever_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuple of two that are one tuple of two, and so on: 2 ** 200 to who hashes it."""
    monkeypatch.setattr(readers, "READ_LIMIT_S", 5.0)
    nested = b")" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(200))
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as members:
        members.writestr("x/data.pkl", b"\x80\x02}" + nested + b"Ns.")
        members.writestr("x/version", b"3\n")
    with pytest.raises(CheckpointError, match="is no checkpoint of openai-whisper"):
        read_openai(tmp_path / "x.pt")
