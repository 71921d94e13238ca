"""Text to tokens and back, against openai-whisper's own tokenizer."""

import json
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asr_server.checkpoint.tokenizer import Timestamps, Tokenizer, num_letters
from asr_server.core import ChunkResult, DecodingOptions
from asr_server.errors import CheckpointError
from tests.support.checkpoints import pocket_directory
from tests.support.tokens import TOKENIZER, t, words

SENTENCES = (
    " And so, my fellow Americans, ask not what your country can do for you.",
    "Größe, naïve café — 50 % off!",
    "你好，世界 🌍 नमस्ते",
    "  two  spaces\nand a line\t",
    "<|endoftext|> <|0.00|> <|en|> <|startoftranscript|>",
    "",
)


@cache
def ours() -> Tokenizer:
    return Tokenizer.from_directory(pocket_directory())


@cache
def openais() -> Any:
    from whisper.tokenizer import get_tokenizer

    with warnings.catch_warnings():  # it leaves its vocabulary file to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        return get_tokenizer(True, num_languages=99)


@pytest.mark.parametrize("text", SENTENCES)
def test_encoding_gives_the_tokens_of_openai_whisper(text: str) -> None:
    assert ours().encode(text) == openais().encoding.encode(text, disallowed_special=())


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    assert ours().decode(ours().encode(text)) == text


def test_special_and_timestamp_tokens_have_no_text() -> None:
    specials = ours().specials
    tokens = [
        specials.start_of_transcript,
        specials.timestamp_begin,
        *ours().encode(" hi"),
        specials.end_of_text,
    ]
    assert ours().decode(tokens) == " hi"
    assert ours().decode_bytes(specials.end_of_text) == b""


def test_bytes_of_split_characters_join_to_the_text() -> None:
    tokens = ours().encode("🌍")
    assert len(tokens) > 1
    assert b"".join(ours().decode_bytes(token) for token in tokens) == "🌍".encode()
    assert ours().decode(tokens[:1]) == "\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_those_of_openai_whisper() -> None:
    specials, theirs = ours().specials, openais()
    assert specials.end_of_text == theirs.eot
    assert specials.start_of_transcript == theirs.sot
    assert specials.start_of_prev == theirs.sot_prev
    assert specials.no_speech == theirs.no_speech
    assert specials.no_timestamps == theirs.no_timestamps
    assert specials.timestamp_begin == theirs.timestamp_begin
    assert (specials.transcribe, specials.translate) == (theirs.transcribe, theirs.translate)
    assert specials.languages == dict(zip(theirs.all_language_codes, theirs.all_language_tokens, strict=True))
    assert specials.is_multilingual


def copy_of(files: list[str], target: Path) -> Path:
    for name in files:
        (target / name).write_bytes((pocket_directory() / name).read_bytes())
    return target


def test_vocabulary_and_merges_do_where_tokenizer_json_is_absent(tmp_path: Path) -> None:
    directory = copy_of(["vocab.json", "merges.txt"], tmp_path)
    added = {token["content"]: token["id"] for token in _description()["added_tokens"]}
    (directory / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.specials == ours().specials
    for text in SENTENCES:
        assert tokenizer.encode(text) == ours().encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_languages_are_those_the_generation_config_names(tmp_path: Path) -> None:
    directory = copy_of(["tokenizer.json"], tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"lang_to_id": {"<|de|>": 50261}}))
    assert Tokenizer.from_directory(directory).specials.languages == {"de": 50261}


def test_an_english_only_checkpoint_says_so(tmp_path: Path) -> None:
    directory = copy_of(["tokenizer.json"], tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"is_multilingual": False}))
    assert not Tokenizer.from_directory(directory).specials.is_multilingual


@pytest.mark.slow
@pytest.mark.parametrize("token", [None, "x", 0.5, -1, True])
def test_an_added_token_whose_id_is_no_number_is_refused(token: object, tmp_path: Path) -> None:
    path = copy_of(["tokenizer.json"], tmp_path) / "tokenizer.json"
    description = json.loads(path.read_text())
    description["added_tokens"][1]["id"] = token
    path.unlink()
    path.write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="is no whole number"):
        Tokenizer.from_directory(tmp_path)


def test_null_in_the_generation_config_is_as_good_as_absent(tmp_path: Path) -> None:
    shutil.copytree(pocket_directory(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "generation_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(dict.fromkeys(content)))
    assert Tokenizer.from_directory(tmp_path).specials == ours().specials


def test_a_tokenizer_without_whispers_tokens_is_refused(tmp_path: Path) -> None:
    description = _description() | {"added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="not a Whisper tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"added_tokens": [], "model": {"type": "none"}}', "no json"]
)
def test_a_file_that_is_no_tokenizer_is_refused_in_a_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"cannot be used: .+"):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    directory = copy_of(["tokenizer.json"], tmp_path)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        Tokenizer.from_directory(directory)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def _description() -> dict[str, Any]:
    description: dict[str, Any] = json.loads((pocket_directory() / "tokenizer.json").read_text())
    return description


@pytest.mark.parametrize(
    ("text", "num"), [("ab, é!", 3), ("7", 3), ("a1", 4), ("你", 3), ("カ", 3), ("Ａ", 3), ("", 0)]
)
def test_a_digit_and_a_wide_character_count_as_three_letters(text: str, num: int) -> None:
    assert num_letters(text) == num


TIMED = DecodingOptions()
TAIL = (t(0), *words("1"), t(2), t(2.5), *words("23"))


def result(*tokens: int, finish_reason: Literal["stop", "length"] = "stop") -> ChunkResult:
    return ChunkResult(tokens, (0.0,) * len(tokens), -0.1, 0.0, 1.0, 0.0, "en", finish_reason)


def test_the_text_behind_the_last_closed_time_is_unread() -> None:
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), TIMED) == (3, 2.0)


@pytest.mark.parametrize("change", [{"max_new_tokens": 9}, {"is_last_part": True}])
def test_where_nothing_can_be_read_again_all_is_read(change: dict[str, bool | int]) -> None:
    options = msgspec.structs.replace(TIMED, **change)
    assert Timestamps(TOKENIZER, 6.0).tail(result(*TAIL), options) == (len(TAIL), None)


def one_and_two(closed_s: float, *behind: int) -> ChunkResult:
    """ "one" up to a time, "two" from there on, and more behind it."""
    border = t(closed_s)
    return result(t(0), *words("1"), border, border, *words("2"), *behind)


def test_where_no_text_is_closed_all_is_read() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    for tokens in ((), words("12"), (t(1),), (t(0), *words("12"))):
        assert times.tail(result(*tokens), TIMED) == (len(tokens), None)


def test_a_text_that_ends_with_a_time_is_whole_unless_it_was_cut_off_there() -> None:
    times, end = Timestamps(TOKENIZER, 6.0), t(3)
    tokens = one_and_two(1.0, end).tokens
    assert times.tail(result(*tokens), TIMED) == (len(tokens), None)
    assert times.tail(result(*tokens, finish_reason="length"), TIMED) == (len(tokens), 3.0)
    begun = (*tokens, end)  # the next text begins there, and nothing of it was read
    assert times.tail(result(*begun), TIMED) == (len(tokens), 3.0)
    assert times.tail(result(*begun, finish_reason="length"), TIMED) == (len(tokens), 3.0)


def test_a_border_is_two_times_in_a_row() -> None:
    times = Timestamps(TOKENIZER, 6.0)
    assert times.borders(TAIL) == [3]
    assert times.borders((t(0), t(0), *words("1"))) == [1]
    assert times.borders((t(0), *words("1"), t(1), *words("2"))) == []
    assert times.is_time(t(0))
    assert not times.is_time(t(0) - 1)
