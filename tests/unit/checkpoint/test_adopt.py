"""Models in other programs' formats, served as they are: the weights stay where they lie."""

import json
import os
import shutil
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from asr_server.annexes.model_sources.adopt import adopt
from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.annexes.model_sources.foreign import explain_listing
from asr_server.checkpoint.files import name_elsewhere, own_cache, read_json, source_of
from asr_server.checkpoint.sizes import read_alignment_heads
from asr_server.checkpoint.tensors import find_weights
from asr_server.checkpoint.tokenizer import Tokenizer
from asr_server.errors import CheckpointError
from asr_server.model import WhisperSizes, load_whisper
from asr_server.model.weights import StoredWeights
from harness.checkpoints import BEHIND_LANGUAGES
from tests.support.checkpoints import narrow_large_directory, pocket_directory
from tests.support.real_weights import hugging_face_checkpoint, real_checkpoint
from tests.unit.checkpoint.binary_models import ctranslate2, ggml, ggml_tensor, variable
from tests.unit.checkpoint.foreign_models import (
    SIZES,
    random_reference,
    write_ctranslate2,
    write_ggml,
    write_openai,
)
from tests.unit.model.test_weights import logits_are_the_same
from tests.unit.model.test_whisper import our_logits


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for each test, in which the tokenizer's model is the one that was fetched before."""
    home = tmp_path_factory.mktemp("home")
    (home / "asr-server").mkdir()
    if (own_cache() / "models").exists():
        (home / "asr-server" / "models").symlink_to(own_cache() / "models")
    monkeypatch.setenv("HF_HOME", str(home))


def weights_of(directory: Path) -> StoredWeights:
    return StoredWeights(find_weights(directory))


class Folders(dict[str, Path]):
    """The pocket checkpoint as CTranslate2 folders, each by its kind of number and made when it is wanted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, kind: str) -> Path:
        self[kind] = write_ctranslate2(pocket_directory(), self._folder / kind, kind)
        return self[kind]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("ct2"))


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model as other programs' single files."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        "openai": write_openai(random_reference(), folder / "mine.pt"),
        "ggml": write_ggml(random_reference(), folder / "ggml-mine.bin"),
    }


@pytest.mark.parametrize("kind", ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.trial)])
def test_floats_of_a_ctranslate2_folder_are_the_checkpoints(folders: Folders, kind: str) -> None:
    before = load_file(pocket_directory() / "model.safetensors")
    found = weights_of(resolve_checkpoint(str(folders[kind])))
    assert {f"model.{name}" for name in found} == set(before) - {"proj_out.weight"}
    dtype = getattr(torch, kind)
    assert all(torch.equal(found[name].float(), before[f"model.{name}"].to(dtype).float()) for name in found)


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.trial) for kind in ("int8_float16", "int16"))]
)
def test_integers_of_a_ctranslate2_folder_are_divided_by_their_scales(folders: Folders, kind: str) -> None:
    """Each number is as near as rounding leaves it: half a step, where the row's largest is 127 steps."""
    before = load_file(pocket_directory() / "model.safetensors")
    found = weights_of(resolve_checkpoint(str(folders[kind])))
    scaled = [name for name, tensor in find_weights_of(folders[kind]).items() if tensor.scale]
    assert len(scaled) > 20
    for name in scaled:
        original = before[f"model.{name}"].float()
        largest = original.abs().flatten(1).amax(1) if kind != "int16" else original.abs().max()
        step = largest / 127 if kind != "int16" else stacked_largest(before, name) / 1024
        error = (found[name] - original).abs().flatten(1)
        assert (error <= 0.5001 * step.reshape(-1, 1) + 1e-9).all(), name


def find_weights_of(folder: Path):  # type: ignore[no-untyped-def]
    (file,) = find_weights(resolve_checkpoint(str(folder)))
    return file.tensors


def stacked_largest(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The largest of the rows that are stored as one, which share one scale in int16."""
    parts = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv"}
    *head, module, parameter = name.split(".")
    stacked = parts.get(module, "")
    if head[-1] == "encoder_attn":
        stacked = stacked.replace("q", "") if module != "q_proj" else ""
    names = [".".join(["model", *head, f"{letter}_proj", parameter]) for letter in stacked]
    return torch.stack([weights[each].abs().max() for each in names or [f"model.{name}"]]).max()


def test_a_ctranslate2_folder_gives_the_checkpoints_logits_and_tokens(folders: Folders) -> None:
    directory = resolve_checkpoint(str(folders["float32"]))
    ours, before = (load_whisper(each, "cpu", torch.float32) for each in (directory, pocket_directory()))
    assert torch.equal(our_logits(ours, one_by_one=False), our_logits(before, one_by_one=False))
    assert ours.sizes == before.sizes
    assert ours.alignment_heads == before.alignment_heads
    assert (
        Tokenizer.from_directory(directory).specials == Tokenizer.from_directory(pocket_directory()).specials
    )


def test_nothing_is_copied_and_a_second_start_finds_the_reading(folders: Folders) -> None:
    directory = resolve_checkpoint(str(folders["float16"]))
    made = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert sum(path.stat().st_size for path in directory.iterdir()) < 4_000_000
    assert resolve_checkpoint(str(folders["float16"])) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == made
    assert source_of(directory) == folders["float16"]
    assert name_elsewhere(directory) == str(folders["float16"])


def test_a_file_that_changes_is_read_anew_not_by_the_old_places(folders: Folders, tmp_path: Path) -> None:
    mine = shutil.copytree(folders["float16"], tmp_path / "mine")
    before = resolve_checkpoint(str(mine))
    shutil.copy(folders["float32"] / "model.bin", mine / "model.bin")
    assert resolve_checkpoint(str(mine)) != before
    with pytest.raises(CheckpointError, match=r"model\.bin has changed since"):
        load_whisper(before, "cpu", torch.float32)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "preprocessor_config.json"])
def test_a_small_file_that_changes_is_read_anew(folders: Folders, tmp_path: Path, name: str) -> None:
    """Its date may be the same, as `cp -p` leaves it."""
    mine = shutil.copytree(folders["float16"], tmp_path / "mine")
    before = resolve_checkpoint(str(mine))
    content, about = json.loads((mine / name).read_text()), (mine / name).stat()
    changed = json.dumps(content | {"one_more": 1})
    (mine / name).write_text(changed)
    os.utime(mine / name, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = resolve_checkpoint(str(mine))
    assert after != before
    assert resolve_checkpoint(str(mine)) == after


def test_a_cache_that_cannot_be_written_is_done_without(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))  # nobody can make a folder in that
    assert len(weights_of(resolve_checkpoint(str(folders["int8"])))) > 50


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.trial), torch.float16])
def test_a_file_of_openai_whisper_is_the_same_model(tmp_path: Path, dtype: torch.dtype) -> None:
    real_checkpoint("base")  # whose tokenizer it needs
    reference = random_reference().to(dtype).float()
    path = write_openai(reference, tmp_path / "mine.pt", dtype)
    logits_are_the_same(resolve_checkpoint(str(path)), reference)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_file_of_whisper_cpp_is_the_same_model(tmp_path: Path, kind: int) -> None:
    real_checkpoint("base")
    reference = random_reference()
    if kind == 1:
        with torch.no_grad():
            for tensor in reference.parameters():
                tensor.copy_(tensor.half().float())
    logits_are_the_same(
        resolve_checkpoint(str(write_ggml(reference, tmp_path / "ggml-mine.bin", kind))), reference
    )


def test_what_such_a_file_lacks_is_the_published_models(tmp_path: Path) -> None:
    directory = resolve_checkpoint(str(write_ggml(random_reference(), tmp_path / "ggml-mine.bin")))
    published = hugging_face_checkpoint("base")
    for name in ("suppress_tokens", "begin_suppress_tokens", "lang_to_id", "max_initial_timestamp_index"):
        ours, theirs = (
            json.loads((each / "generation_config.json").read_text())[name] for each in (directory, published)
        )
        assert ours == theirs
    assert Tokenizer.from_directory(directory).encode(" Häuser") == Tokenizer.from_directory(
        published
    ).encode(" Häuser")


@pytest.mark.parametrize("name", ["base", pytest.param("tiny.en", marks=pytest.mark.trial)])
def test_published_weights_are_the_same_in_every_format(tmp_path: Path, name: str) -> None:
    folder = hugging_face_checkpoint(name)
    expected = load_file(folder / "model.safetensors")
    directory = real_checkpoint(name)
    found = weights_of(directory)
    assert {f"model.{each}" for each in found} == set(expected)
    assert all(torch.equal(found[each], expected[f"model.{each}"]) for each in found)
    sizes = WhisperSizes.from_directory(directory)
    assert read_alignment_heads(directory, sizes) == read_alignment_heads(folder, sizes)


def test_the_heads_of_a_published_file_are_openai_whispers(tmp_path: Path) -> None:
    """Its own dump of them, taken by its own code, for every size."""
    import whisper
    from whisper.model import ModelDimensions
    from whisper.model import Whisper as Reference

    from asr_server.annexes.model_sources.names import published_heads

    sizes = {
        "tiny": (384, 4),
        "base": (512, 6),
        "small": (768, 12),
        "medium": (1024, 24),
        "large": (1280, 32),
    }
    for name, dump in whisper._ALIGNMENT_HEADS.items():
        width, layers = sizes[name.partition(".")[0].partition("-")[0].replace("turbo", "large")]
        layers = 4 if "turbo" in name else layers
        vocabulary = (
            51864 if name.endswith(".en") else 51866 if "v3" in name or name in ("large", "turbo") else 51865
        )
        model = Reference(ModelDimensions(1, 1, 8, 1, 0, 1, 1, width // 64, width // 64, layers))
        model.set_alignment_heads(dump)
        config = {"d_model": width, "vocab_size": vocabulary, "decoder_layers": layers}
        expected = sorted(map(tuple, model.alignment_heads.indices().T.tolist()))
        assert sorted(published_heads(config, name)) == expected, name


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # openai-whisper's open file
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_vocabulary_with_cantonese_is_made_of_base_s(tmp_path: Path) -> None:
    """large-v3's tokens, as openai-whisper numbers them."""
    from whisper.tokenizer import get_tokenizer

    real_checkpoint("base")
    sizes = SIZES.__class__(**{**SIZES.__dict__, "n_vocab": 51866, "n_mels": 128})
    directory = resolve_checkpoint(str(write_ggml(random_reference(sizes), tmp_path / "ggml-v3.bin")))
    specials = Tokenizer.from_directory(directory).specials
    theirs = get_tokenizer(True, num_languages=100)
    assert specials.languages == {code: theirs.to_language_token(code) for code in theirs.all_language_codes}
    assert (specials.no_timestamps, specials.timestamp_begin) == (
        theirs.no_timestamps,
        theirs.timestamp_begin,
    )
    assert (specials.start_of_prev, specials.no_speech) == (theirs.sot_prev, theirs.no_speech)
    assert (specials.transcribe, specials.translate) == (theirs.transcribe, theirs.translate)
    suppressed = json.loads((directory / "generation_config.json").read_text())["suppress_tokens"]
    special = {theirs.transcribe, theirs.translate, theirs.sot, theirs.sot_prev, theirs.sot_lm}
    assert set(suppressed) == {*theirs.non_speech_tokens, *special, theirs.no_speech}


def test_a_large_ctranslate2_folder_keeps_its_own_tokenizer(tmp_path: Path) -> None:
    directory = resolve_checkpoint(
        str(write_ctranslate2(narrow_large_directory(), tmp_path / "large", "int8"))
    )
    ours, before = (Tokenizer.from_directory(each).specials for each in (directory, narrow_large_directory()))
    assert ours == before
    assert "yue" in ours.languages


# -- What is damaged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 3, 60, 70_000, 10_000_000, -1])
@pytest.mark.parametrize("kind", ["ctranslate2", "openai", "ggml"])
def test_a_file_that_is_cut_short_is_refused_in_a_line(
    folders: Folders, whole_files: dict[str, Path], tmp_path: Path, kind: str, length: int
) -> None:
    if kind == "ctranslate2":
        path = shutil.copytree(folders["float32"], tmp_path / "mine") / "model.bin"
    else:
        path = Path(shutil.copy(whole_files[kind], tmp_path))
    os.truncate(path, path.stat().st_size - 1 if length < 0 else length)
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(str(path.parent if kind == "ctranslate2" else path))
    assert "\n" not in str(caught.value)
    readings = own_cache() / "readings"
    assert not readings.exists() or not list(readings.iterdir())


def test_a_ctranslate2_model_of_another_kind_is_refused(folders: Folders, tmp_path: Path) -> None:
    mine = shutil.copytree(folders["float32"], tmp_path / "mine")
    content = (mine / "model.bin").read_bytes()
    (mine / "model.bin").write_bytes(content.replace(b"WhisperSpec", b"BarkSpec123", 1))
    with pytest.raises(CheckpointError, match="holds a BarkSpec123 model"):
        resolve_checkpoint(str(mine))
    (mine / "model.bin").write_bytes(b"\x05" + content[1:])
    with pytest.raises(CheckpointError, match="is of version 5 of CTranslate2's layout"):
        resolve_checkpoint(str(mine))


def test_a_vocabulary_of_one_s_own_needs_a_tokenizer_by_name(tmp_path: Path) -> None:
    sizes = SIZES.__class__(**{**SIZES.__dict__, "n_vocab": 40_000})
    path = write_ggml(random_reference(sizes), tmp_path / "ggml-mine.bin")
    with pytest.raises(CheckpointError, match=rf"asr-server convert {path} DIRECTORY --tokenizer CHECKPOINT"):
        resolve_checkpoint(str(path))


def test_weights_in_several_files_are_read_where_they_lie(tmp_path: Path) -> None:
    copy = shutil.copytree(pocket_directory(), tmp_path / "sharded")
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: weights[name] for name in some}, copy / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    found = weights_of(resolve_checkpoint(str(copy)))
    assert all(torch.equal(found[name.removeprefix("model.")], tensor) for name, tensor in weights.items())


def test_offline_a_file_without_its_tokenizer_says_how_to_bring_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model base` would be no answer to whoever has a model of their own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    path = write_ggml(random_reference(SIZES), tmp_path / "ggml-base.bin")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(str(path))
    said = str(caught.value)
    assert said.startswith(f"{path} comes without a tokenizer: ")
    assert said.endswith("prints to this machine: `asr-server convert MODEL DIRECTORY --tokenizer FOLDER`")
    assert "--model" not in said


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["model.bin", "vocabulary.txt"], "has no config.json"),
        (["model.safetensors"], "has no config.json"),
        (["ggml-small.bin", "ggml-base.bin"], "such as ggml-base.bin: fetch one"),
        (["tiny.pt"], "such as tiny.pt"),
        (["whisper-small.gguf"], "holds GGUF models. Use the model that it was made from: small"),
        (["weights.npz"], "is an MLX model"),
    ],
)
def test_a_listing_that_cannot_be_served_says_what_to_do(files: list[str], words: str) -> None:
    assert words in str(explain_listing("someone/whisper-small", files))


WIDTH, HIDDEN = 4, 8
ENGLISH, MULTILINGUAL, CANTONESE = 51_864, 51_865, 51_866


def tokens(languages: Iterable[str] = ("en", "su")) -> dict[str, int]:
    """The special tokens of a published tokenizer; its last language is the 50357th token."""
    names = ["<|endoftext|>", "<|startoftranscript|>"]
    ids = dict(zip(names, (50_257, 50_258), strict=True))
    last = 50_357
    ids |= {f"<|{code}|>": last - place for place, code in enumerate(reversed(list(languages)))}
    return ids | {name: last + 1 + place for place, name in enumerate(BEHIND_LANGUAGES)}


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


def write_ggml_header(path: Path, vocabulary: int) -> Path:
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
def test_a_single_file_takes_its_vocabularys_tokenizer(tmp_path: Path, vocabulary: int, asked: str) -> None:
    texts = write_tokenizer(tmp_path / "texts", tokens(), suppress_tokens=[50_357, 50_358, 50_359])
    names: list[str] = []

    def find_texts(name: str) -> Path:
        names.append(name)
        return texts

    directory = adopt(write_ggml_header(tmp_path / "ggml-x.bin", vocabulary), find_texts)
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


def test_a_tokenizer_without_tokens_of_its_own_is_refused(tmp_path: Path) -> None:
    source = ctranslate2_folder(tmp_path / "mine")
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is no Whisper tokenizer: 'added_tokens' is missing"):
        adopt(source, nobody)


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|startofprev|>", "<|notimestamps|>"])
def test_a_tokenizer_without_whispers_tokens_is_refused_and_not_kept(tmp_path: Path, name: str) -> None:
    source = ctranslate2_folder(tmp_path / "mine")
    write_tokenizer(source, {other: number for other, number in tokens().items() if other != name})
    with pytest.raises(CheckpointError, match=r"is no Whisper tokenizer: .* is missing"):
        adopt(source, nobody)
    assert not list((own_cache() / "readings").iterdir())


def test_another_process_that_is_sooner_is_no_harm(tmp_path: Path) -> None:
    source, texts = (
        write_ggml_header(tmp_path / "x.bin", MULTILINGUAL),
        write_tokenizer(tmp_path / "texts", tokens()),
    )
    sooner: list[Path] = []

    def while_another_reads(name: str) -> Path:
        sooner.append(adopt(source, lambda _: texts))
        return texts

    assert adopt(source, while_another_reads) == sooner[0]
    assert list(sooner[0].parent.iterdir()) == sooner
