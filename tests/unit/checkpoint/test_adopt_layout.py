"""What is written for a model of another program: of small files whose tensors are all zeros."""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from asr_server.annexes.model_sources.adopt import adopt
from asr_server.checkpoint.files import read_json
from asr_server.errors import CheckpointError
from tests.unit.checkpoint.binary_models import ctranslate2, ggml, ggml_tensor, variable

WIDTH, HIDDEN = 4, 8
ENGLISH, MULTILINGUAL, CANTONESE = 51_864, 51_865, 51_866
SPECIAL = (
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def tokens(languages: Iterable[str] = ("en", "su")) -> dict[str, int]:
    """The special tokens of a published tokenizer; its last language is the 50357th token."""
    names = ["<|endoftext|>", "<|startoftranscript|>"]
    ids = dict(zip(names, (50_257, 50_258), strict=True))
    last = 50_357
    ids |= {f"<|{code}|>": last - place for place, code in enumerate(reversed(list(languages)))}
    return ids | {name: last + 1 + place for place, name in enumerate(SPECIAL)}


def write_tokenizer(folder: Path, ids: dict[str, int], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    added = [{"id": number, "content": content, "special": True} for content, number in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {}, "added_tokens": added}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ctranslate2_folder(folder: Path, positions: int = 1500) -> Path:
    """A CTranslate2 folder with a tokenizer of its own."""
    shapes = {
        "encoder/conv1/weight": (WIDTH, 80, 3),
        "encoder/position_encodings/encodings": (positions, WIDTH),
        "decoder/position_encodings/encodings": (448, WIDTH),
        "decoder/embeddings/weight": (MULTILINGUAL, WIDTH),
        "encoder/layer_0/ffn/linear_0/weight": (HIDDEN, WIDTH),
        "decoder/layer_0/ffn/linear_0/weight": (HIDDEN, WIDTH),
    }
    items = [variable(name, shape, bytes(_count(shape)), dtype=1) for name, shape in shapes.items()]
    config = {"suppress_ids": [1, 2], "suppress_ids_begin": [220], "alignment_heads": [[0, 1]]}
    write_tokenizer(folder, tokens(), **config)
    (folder / "model.bin").write_bytes(ctranslate2(b"".join(items), len(items), end=struct.pack("<I", 0)))
    return folder


def _count(shape: tuple[int, ...]) -> int:
    number = 1
    for size in shape:
        number *= size
    return number


def write_ggml(path: Path, vocabulary: int) -> Path:
    shapes = {
        "encoder.conv1.weight": (WIDTH, 80, 3),
        "encoder.positional_embedding": (1500, WIDTH),
        "decoder.positional_embedding": (448, WIDTH),
        "decoder.token_embedding.weight": (vocabulary, WIDTH),
        "encoder.blocks.0.mlp.0.weight": (HIDDEN, WIDTH),
        "decoder.blocks.0.mlp.0.weight": (HIDDEN, WIDTH),
    }
    sizes = (vocabulary, 1500, WIDTH, 1, 1, 448, WIDTH, 1, 1, 80, 1)
    parts = [ggml_tensor(name, shape, bytes(2 * _count(shape)), kind=1) for name, shape in shapes.items()]
    path.write_bytes(ggml(0, 0, 0, sizes=sizes) + b"".join(parts))
    return path


def nobody(name: str) -> Path:
    pytest.fail(f"asked for {name}")


def rules_of(directory: Path) -> dict[str, Any]:
    return read_json(directory / "generation_config.json")


def test_a_folders_own_description_of_its_features_and_rules_is_kept(tmp_path: Path) -> None:
    source = ctranslate2_folder(tmp_path / "mine")
    (source / "preprocessor_config.json").write_text('{"feature_size": 80, "padding": "zeros"}')
    (source / "generation_config.json").write_text(
        '{"suppress_tokens": [7], "max_initial_timestamp_index": 9}'
    )
    directory = adopt(source, nobody)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert read_json(directory / "preprocessor_config.json") == {"feature_size": 80, "padding": "zeros"}
    rules = rules_of(directory)
    assert (rules["suppress_tokens"], rules["begin_suppress_tokens"]) == ([7], [])
    assert rules["max_initial_timestamp_index"] == 9


@pytest.mark.parametrize(
    ("vocabulary", "asked"), [(ENGLISH, "tiny.en"), (MULTILINGUAL, "base"), (CANTONESE, "base")]
)
def test_a_single_file_takes_the_tokenizer_of_its_vocabulary(
    tmp_path: Path, vocabulary: int, asked: str
) -> None:
    texts = write_tokenizer(tmp_path / "texts", tokens(), suppress_tokens=[50_357, 50_358, 50_359])
    names: list[str] = []

    def find_texts(name: str) -> Path:
        names.append(name)
        return texts

    directory = adopt(write_ggml(tmp_path / "ggml-x.bin", vocabulary), find_texts)
    rules = rules_of(directory)
    assert names == [asked]
    assert rules["is_multilingual"] is (vocabulary != ENGLISH)
    assert ("lang_to_id" in rules, "task_to_id" in rules) == (vocabulary != ENGLISH,) * 2
    assert rules["alignment_heads"] == []
    added = read_json(directory / "tokenizer.json")["added_tokens"]
    found = {token["content"]: token["id"] for token in added}
    if vocabulary == CANTONESE:  # a language more, and all behind it one further
        expected = {name: number + (number >= 50_358) for name, number in tokens().items()} | {
            "<|yue|>": 50_358
        }
        assert rules["suppress_tokens"] == [50_357, 50_359, 50_360]
        assert [token["id"] for token in added] == sorted(expected.values())
    else:
        expected = tokens()
        assert rules["suppress_tokens"] == [50_357, 50_358, 50_359]
    assert found == expected


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|startofprev|>", "<|notimestamps|>"])
def test_a_tokenizer_without_whispers_tokens_is_refused_and_nothing_is_kept(
    tmp_path: Path, name: str
) -> None:
    source = ctranslate2_folder(tmp_path / "mine")
    write_tokenizer(source, {other: number for other, number in tokens().items() if other != name})
    with pytest.raises(CheckpointError, match=r"is no Whisper tokenizer: .* is missing"):
        adopt(source, nobody)
    assert not list((tmp_path / "home" / "asr-server" / "readings").iterdir())


def test_another_process_that_is_sooner_is_no_harm(tmp_path: Path) -> None:
    source, texts = (
        write_ggml(tmp_path / "x.bin", MULTILINGUAL),
        write_tokenizer(tmp_path / "texts", tokens()),
    )
    sooner: list[Path] = []

    def while_another_reads(name: str) -> Path:
        sooner.append(adopt(source, lambda _: texts))
        return texts

    assert adopt(source, while_another_reads) == sooner[0]
    assert list(sooner[0].parent.iterdir()) == sooner
