"""Damaged files of checkpoints, each read by a child with 10 s and 200 MB: taken, or refused in one line."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from asr_server.config import EMBEDDED_MODEL
from tests.system.fuzz.fuzzing import damaged, fuzz, fuzzing
from tests.unit.checkpoint.binary_models import SIZES, ggml, variable
from tests.unit.checkpoint.test_hostile import SERVER

JSON_FILES = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "tokenizer.json"),
    *("vocab.json", "added_tokens.json"),
)
ODD: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 0.5, 3_000_000, 1 << 70, 1e308),
    *("", "x", "\ud800", [], {}, [[]], {"": 0}),
)


@pytest.fixture
def reader() -> Iterator[subprocess.Popen[str]]:
    """Resolves a checkpoint a line, see `SERVER`."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def read_by(reader: subprocess.Popen[str], path: Path) -> str:
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{path}\n")
    reader.stdin.flush()
    answer = json.loads(reader.stdout.readline())
    kind, _, message = answer.partition(": ")
    assert kind in ("taken", "CheckpointError"), answer
    assert "\n" not in message, message
    return str(kind)


def changed_json(name: str) -> SearchStrategy[bytes]:
    """The file with one value replaced, at any depth, or damaged as bytes."""
    whole = (EMBEDDED_MODEL / name).read_bytes()

    def change(places: list[int], value: object) -> bytes:
        content = json.loads(whole)
        inner, keys = content, list(_keys(content))
        for place in places:
            key = keys[place % len(keys)]
            if not list(_keys(inner[key])):
                break
            inner = inner[key]
            keys = list(_keys(inner))
        inner[keys[places[-1] % len(keys)]] = value
        return json.dumps(content).encode()

    places = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4)
    return st.builds(change, places, st.sampled_from(ODD)) | damaged(whole)


def _keys(value: object) -> list[str] | range:
    return list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []


def header_of(weights: bytes) -> bytes:
    return weights[: 8 + int.from_bytes(weights[:8], "little")]


def openai_file() -> bytes:
    dims = dict.fromkeys(("n_mels", "n_audio_ctx", "n_audio_state", "n_vocab", "n_text_layer"), 2)
    state = {"encoder.conv1.weight": torch.zeros(2, 2, 3), "decoder.ln.bias": torch.zeros(2)}
    content = io.BytesIO()
    torch.save({"dims": dims, "model_state_dict": state}, content)
    return content.getvalue()


def ggml_file() -> bytes:
    words = (3).to_bytes(4, "little") + b"abc" + (1).to_bytes(4, "little") + b"d"
    tensor = (
        b"".join(number.to_bytes(4, "little") for number in (1, 20, 0, 2))
        + b"encoder.conv1.weight"
        + bytes(8)
    )
    return ggml(0, 0, 2, sizes=SIZES) + words + tensor * 2


def ctranslate2_file() -> bytes:
    name = b"WhisperSpec\0"
    head = (6).to_bytes(4, "little") + len(name).to_bytes(2, "little") + name
    variables = variable("encoder/conv1/weight", (2,), bytes(8)) + variable("a/scale", (1,), bytes(4))
    return head + (3).to_bytes(4, "little") + (2).to_bytes(4, "little") + variables + bytes(4)


@fuzzing
def test_damaged_checkpoints_are_read_or_refused(reader: subprocess.Popen[str], tmp_path: Path) -> None:
    layout, translated = tmp_path / "layout", tmp_path / "ctranslate2"
    layout.mkdir()
    translated.mkdir()
    (translated / "config.json").write_text("{}")
    (translated / "vocabulary.txt").write_text("")
    weights = (EMBEDDED_MODEL / "model.safetensors").read_bytes()

    def check(example: tuple[str, bytes]) -> None:
        name, content = example
        for file in EMBEDDED_MODEL.iterdir():
            (layout / file.name).unlink(missing_ok=True)
            (layout / file.name).symlink_to(file)
        path = translated / name if name == "model.bin" else layout / name
        path = tmp_path / name if name in ("x.pt", "ggml-x.bin") else path
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        if name == "model.safetensors":
            os.truncate(path, len(weights))
        read_by(reader, path if path.parent == tmp_path else path.parent)

    kinds = {name: changed_json(name) for name in JSON_FILES} | {
        "model.safetensors": damaged(header_of(weights)),
        "x.pt": damaged(openai_file()),
        "ggml-x.bin": damaged(ggml_file()),
        "model.bin": damaged(ctranslate2_file()),
    }
    examples = [st.tuples(st.just(name), contents) for name, contents in kinds.items()]
    fuzz(st.one_of(examples), check, psutil.Process(reader.pid))
