"""Tensors in files of `torch.save`, found without running what the files ask for."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asr_server.checkpoint.pickled import (
    _contiguous,
    _Storage,
    _Unpickler,
    check_pickled,
    read_openai,
    read_torch,
)
from asr_server.errors import CheckpointError

DIMS = {"n_audio_head": 2, "n_text_head": 3, "n_audio_layer": 4, "n_text_layer": 5, "n_mels": 80}
NO_CHECKPOINT, DAMAGED = "is no checkpoint of openai-whisper", "is cut short or damaged"
LARGE = torch.arange(24.0).view(6, 4)
TENSORS = {
    "F32": LARGE,
    "F16": LARGE.half(),
    "BF16": LARGE.bfloat16(),
    "F64": LARGE.double(),
    "I64": LARGE.long(),
    "I32": LARGE.int(),
    "U8": LARGE.byte(),
    "a part of another's numbers": LARGE[2:5],
    "a column that is stored as a row": LARGE[:1].T,
    "trained": torch.nn.Parameter(LARGE),
}


def save(path: Path, tensors: dict[Any, Any], **more: Any) -> Path:
    torch.save({"dims": DIMS, "model_state_dict": tensors} | more, path)
    return path


def numbers(tensor: Tensor) -> bytes:
    return tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def test_every_tensors_numbers_lie_where_its_description_says(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", OrderedDict(TENSORS))
    model = read_openai(path)
    content = path.read_bytes()
    assert list(model.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        stored = model.tensors[name]
        assert stored.shape == tensor.shape
        assert content[stored.offset : stored.end] == numbers(tensor), name
    assert [stored.dtype for stored in model.tensors.values()][:7] == list(TENSORS)[:7]
    check_pickled(path)


def test_names_and_sizes_are_those_of_openai_whisper(tmp_path: Path) -> None:
    model = read_openai(save(tmp_path / "x.pt", {"decoder.blocks.1.cross_attn.key.weight": LARGE}))
    assert list(model.tensors) == ["decoder.layers.1.encoder_attn.k_proj.weight"]
    assert (model.encoder_heads, model.decoder_heads) == (2, 3)
    assert (model.encoder_layers, model.decoder_layers) == (4, 5)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": LARGE.T},
        {"a": LARGE[:, :1]},
        {"a": torch.zeros((1,) * 9)},
        {"a" * 257: LARGE},
        {(1, 2): LARGE},
        {"a": {1, 2}},
        {"a": os.getcwd},
        {"a": "no tensor"},
    ],
)
def test_what_is_no_plain_tensor_under_a_plain_name_is_refused(
    tmp_path: Path, tensors: dict[Any, Any]
) -> None:
    with pytest.raises(CheckpointError, match=NO_CHECKPOINT):
        read_openai(save(tmp_path / "x.pt", tensors))


def test_a_name_may_have_256_letters(tmp_path: Path) -> None:
    assert list(read_openai(save(tmp_path / "x.pt", {"a" * 256: LARGE})).tensors) == ["a" * 256]


def test_another_programs_archive_of_tensors_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": {"a": LARGE}}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=NO_CHECKPOINT):
        read_openai(tmp_path / "x.pt")
    check_pickled(tmp_path / "x.pt")


def rewrite(path: Path, compression: int = zipfile.ZIP_STORED, cut: int | None = None) -> Path:
    """Write the archive once more, the numbers of each tensor cut to so many bytes."""
    target = path.with_name("rewritten.pt")
    with zipfile.ZipFile(path) as members, zipfile.ZipFile(target, "w", compression) as written:
        for name in members.namelist():
            written.writestr(name, members.read(name)[: cut if "/data/" in name else None])
    return target


def test_numbers_that_are_fewer_than_their_shape_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"a": LARGE})
    assert list(read_openai(rewrite(path, cut=96)).tensors) == ["a"]
    with pytest.raises(CheckpointError, match=NO_CHECKPOINT):
        read_openai(rewrite(path, cut=95))


def test_a_compressed_archive_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = rewrite(save(tmp_path / "x.pt", {"a": LARGE}), zipfile.ZIP_DEFLATED)
    for read in (read_openai, check_pickled):
        with pytest.raises(CheckpointError, match=DAMAGED):
            read(path)


def test_a_file_that_is_cut_short_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", {"a": LARGE})
    path.write_bytes(path.read_bytes()[:-30])
    for read in (read_openai, check_pickled):
        with pytest.raises(CheckpointError, match=DAMAGED):
            read(path)


def with_pickle(path: Path, pickled: bytes) -> Path:
    """Write an archive as of `torch.save`, with a description of the test's own."""
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("x/data.pkl", pickled)
        written.writestr("x/data/0", bytes(96))
    return path


@pytest.mark.parametrize(
    "asked_for", [b"os\nFloatStorage", b"torch\nload", b"builtins\neval", b"torch._utils\n_rebuild_tensor"]
)
def test_a_file_that_asks_for_anything_else_is_refused(tmp_path: Path, asked_for: bytes) -> None:
    # {"model_state_dict": {}, "dims": {...}, "more": what is asked for}
    known = pickle.dumps({"model_state_dict": {}, "dims": DIMS}, 2)[2:-1]
    content = b"\x80\x02" + known + b"X\x04\0\0\0more%ss."
    read_openai(with_pickle(tmp_path / "right.pt", content % b"N"))
    with pytest.raises(CheckpointError, match=NO_CHECKPOINT):
        read_openai(with_pickle(tmp_path / "x.pt", content % (b"c" + asked_for + b"\n")))


@pytest.mark.parametrize("dtype", [b"FloatStorage", b"none"])
def test_a_storage_is_of_known_numbers_in_a_named_member(tmp_path: Path, dtype: bytes) -> None:
    # {"model_state_dict": {"a": a storage}, "dims": {...}}
    for member, is_one in ((b"X\x01\0\0\x000", True), (b"K\x00", False)):
        storage = b"(X\x07\0\0\0storage" + b"ctorch\n" + dtype + b"\n" + member + b"X\x03\0\0\0cpuK\x18tQ"
        path = with_pickle(tmp_path / "x.pt", b"\x80\x02" + storage + b".")
        with pytest.raises(CheckpointError, match=NO_CHECKPOINT):
            read_openai(path)
        assert is_one or dtype


def test_a_description_has_a_mebibyte_at_most(tmp_path: Path) -> None:
    right = pickle.dumps({"model_state_dict": {}, "dims": DIMS}, 2)
    check_pickled(with_pickle(tmp_path / "x.pt", right + bytes((1 << 20) - len(right))))
    path = with_pickle(tmp_path / "x.pt", right + bytes((1 << 20) + 1 - len(right)))
    for read in (check_pickled, read_openai):
        with pytest.raises(CheckpointError, match=DAMAGED):
            read(path)


def test_a_list_of_members_longer_than_any_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as written:
        for number in range(20):
            written.writestr(f"x/{number}{'y' * 60_000}", b"")
    for read in (check_pickled, read_openai):
        with pytest.raises(CheckpointError, match=DAMAGED):
            read(path)


# -- Files of torch whose tensors alone are wanted --


def test_of_any_saved_dictionary_the_tensors_of_32_bits_are_read(tmp_path: Path) -> None:
    part = LARGE[2:5]
    state = {"whole": LARGE, "part": part, "half": LARGE.half(), "none": torch.zeros(0, 4)}
    torch.save(state, tmp_path / "x.pt")
    found = read_torch(tmp_path / "x.pt")
    assert {name: values.tolist() for name, values in found.items()} == {
        "whole": LARGE.tolist(),
        "part": part.tolist(),
        "none": [],
    }
    assert found["none"].shape == (0, 4)
    assert {values.dtype.name for values in found.values()} == {"float32"}


class Unknown:
    def __init__(self) -> None:
        self.more = [1, 2]


def test_objects_beside_an_entry_with_tensors_are_passed_over_and_none_is_made(tmp_path: Path) -> None:
    beside = {"type": torch.float32, "place": torch.device("cpu"), "own": [Unknown()], "numbers": {1: 2}}
    torch.save({"beside": beside, "state_dict": {"a": LARGE}}, tmp_path / "x.pt")
    assert read_torch(tmp_path / "x.pt", "state_dict")["a"].tolist() == LARGE.tolist()
    for key in ("more", None):
        with pytest.raises(CheckpointError, match="is no file of torch"):
            read_torch(tmp_path / "x.pt", key)


@pytest.mark.parametrize(
    ("first", "shape", "is_tensor"),
    [
        *((0, (1,) * 8, True), (3, (2,), True), (0, (1,) * 9, False)),
        *((-1, (2,), False), (0, (-2,), False), (0, (2.0,), False), (True, (2,), False)),
    ],
)
def test_a_tensor_has_eight_dimensions_at_most_and_whole_sizes(
    first: int, shape: tuple[Any, ...], is_tensor: bool
) -> None:
    storage, strides = _Storage("F32", "0"), (1,) * len(shape)
    if is_tensor:
        assert _contiguous(storage, first, shape, strides) == (storage, first, shape)
    else:
        with pytest.raises(ValueError, match="a shape that no tensor has"):
            _contiguous(storage, first, shape, strides)


@pytest.mark.parametrize(("dtype", "member"), [("F99", "0"), ("F32", 0)])
def test_a_storage_has_numbers_of_a_kind_and_a_member(dtype: str, member: Any) -> None:
    unpickler = _Unpickler(io.BytesIO())
    assert unpickler.persistent_load(("storage", "F32", "0", "cpu", 4)) == _Storage("F32", "0")
    with pytest.raises(ValueError, match="a storage that is none"):
        unpickler.persistent_load(("storage", dtype, member, "cpu", 4))
