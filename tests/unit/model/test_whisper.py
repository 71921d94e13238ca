"""The model's numbers against transformers', and every form a checkpoint comes in."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asr_server.model import Whisper, WhisperSizes, load_whisper
from asr_server.model.layers import WHOLE, Shard
from asr_server.model.products import Linear, linear_gelu
from asr_server.model.rows import rows_of
from asr_server.model.whisper import Decoder, DecoderLayer, padded_vocabulary
from harness.clips import make_clip
from tests.support.checkpoints import pocket_directory
from tests.unit.engine.small import HEADS, LAYERS, PROMPT, SIZES, clip, random_weights

CLIPS = [make_clip(1, 30), make_clip(2, 4)]
TOKENS = torch.tensor([[50258, 50261, 50359, 50363, 1, 22, 333], [50258, 50262, 50359, 50364, 4444, 5, 66]])


@cache
def ours() -> Whisper:
    return load_whisper(pocket_directory(), "cpu", torch.float32)


@cache
def theirs() -> Any:
    from transformers import WhisperForConditionalGeneration

    model: Any = WhisperForConditionalGeneration.from_pretrained(pocket_directory())
    return model.eval()


@torch.inference_mode()
def our_logits(model: Whisper, one_by_one: bool, scattered: bool = False) -> Tensor:
    """[B, T, vocabulary], the tokens fed at once or each in a call of its own."""
    cache = model.new_cache(3)
    audio = model.encoder(model.log_mel(CLIPS))
    slots = torch.tensor([2, 0]) if scattered else slice(1, 3)
    cache.store_audio(torch.tensor([2, 0] if scattered else [1, 2]), model.decoder.cross_keys_values(audio))
    length = TOKENS.shape[1]
    spans = [(i, i + 1) for i in range(length)] if one_by_one else [(0, length)]
    hidden = []
    for start, end in spans:
        positions = torch.arange(start, end).expand(2, -1)
        hidden.append(
            model.decoder(TOKENS[:, start:end], positions, rows_of(cache, slots, positions, context=end))
        )
    return model.decoder.logits(torch.cat(hidden, dim=1))


@torch.inference_mode()
def their_logits() -> Tensor:
    logits: Tensor = theirs()(input_features=ours().log_mel(CLIPS), decoder_input_ids=TOKENS).logits
    return logits


@pytest.mark.slow
@torch.inference_mode()
def test_the_encoder_gives_transformers_numbers() -> None:
    mel = ours().log_mel(CLIPS)
    expected = theirs().model.encoder(mel).last_hidden_state
    torch.testing.assert_close(ours().encoder(mel), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_the_decoder_gives_transformers_numbers(one_by_one: bool, scattered: bool) -> None:
    found = our_logits(ours(), one_by_one, scattered)
    torch.testing.assert_close(found, their_logits(), atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.trial)])
def test_half_precision_stays_close_to_float32(dtype: torch.dtype) -> None:
    model = load_whisper(pocket_directory(), "cpu", dtype)
    for one_by_one in (False, True):
        found = our_logits(model, one_by_one).float()
        assert torch.isfinite(found).all()
        error = (found - their_logits()).norm() / their_logits().norm()
        assert error < 0.05


@cache
def weights() -> dict[str, Tensor]:
    return load_file(pocket_directory() / "model.safetensors")


def described(target: Path, **changes: object) -> Path:
    config = json.loads((pocket_directory() / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("in_float16", [True, False])
def test_embeddings_take_half_the_memory_where_float16_is_exact(in_float16: bool, tmp_path: Path) -> None:
    """As it has those of all that OpenAI published."""
    name = "model.decoder.embed_tokens.weight"
    stored = weights()[name].half().float() if in_float16 else weights()[name]
    save_file(weights() | {name: stored}, tmp_path / "model.safetensors")
    decoder = load_whisper(described(tmp_path), "cpu", torch.float32).decoder
    assert torch.equal(decoder.embedding.float(), stored)
    assert decoder.embedding.dtype == (torch.float16 if in_float16 else torch.float32)


def test_a_slot_moved_elsewhere_gives_the_same_numbers() -> None:
    model = ours()
    with torch.inference_mode():
        cache = model.new_cache(2)
        cache.write_audio(1, model.decoder.cross_keys_values(model.encoder(model.log_mel(CLIPS[:1]))))
        positions = torch.arange(3)[None]
        model.decoder(TOKENS[:1, :3], positions, rows_of(cache, slice(1, 2), positions, context=3))
        cache.copy_text([(1, 0)], torch.tensor([[1, 0]]), 3)
        last = torch.tensor([[3]])
        here = model.decoder(TOKENS[:1, 3:4], last, rows_of(cache, slice(0, 1), last, context=4))
        there = model.decoder(TOKENS[:1, 3:4], last, rows_of(cache, slice(1, 2), last, context=4))
    assert torch.equal(here, there)


@torch.inference_mode()
def test_keys_and_values_of_one_layer_are_in_the_cache_before_those_of_the_next_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All layers of a large model at once would take gigabytes."""
    model = ours()
    cache, keys_of = model.new_cache(1), DecoderLayer.keys_of
    written: list[list[bool]] = []

    def watched(layer: DecoderLayer, audio: torch.Tensor) -> torch.Tensor:
        written.append([bool(each.any()) for each in cache.cross_values])
        return keys_of(layer, audio)

    monkeypatch.setattr(DecoderLayer, "keys_of", watched)
    audio = model.encoder(model.log_mel(CLIPS[:1]))
    cache.write_audio(0, model.decoder.cross_keys_values(audio))
    num_layers = model.sizes.decoder_layers
    assert written == [[layer < done for layer in range(num_layers)] for done in range(num_layers)]


class LargestOf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of one tensor made in each precision, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: dict[torch.dtype, int] = {}
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.names.add(str(function))
        if isinstance(output, torch.Tensor):
            self.bytes[output.dtype] = max(self.bytes.get(output.dtype, 0), output.nbytes)
        return output


def test_a_model_is_never_made_in_float32_first() -> None:
    """On a GPU that would take twice the memory of its weights."""
    sizes = WhisperSizes.from_directory(pocket_directory())
    with LargestOf() as made:
        Whisper(sizes, torch.device("cpu"), torch.bfloat16)
    assert made.bytes[torch.bfloat16] >= 2 * sizes.vocabulary * sizes.width
    assert made.bytes.get(torch.float32, 0) <= 4 * sizes.num_mels * 201, "the mel filters are the largest"


@pytest.mark.parametrize(("vocabulary", "rows"), [(51865, 51968), (51866, 51968), (51968, 51968), (1, 128)])
def test_a_gpus_output_projection_has_a_multiple_of_128_rows(vocabulary: int, rows: int) -> None:
    assert padded_vocabulary(vocabulary, torch.device("cuda")) == rows
    assert padded_vocabulary(vocabulary, torch.device("cpu")) == vocabulary


def test_a_gpus_scores_are_never_rounded_to_bfloat16() -> None:
    """Likely tokens would tie. With tensors that only pretend to be on a GPU."""
    with FakeTensorMode(), LargestOf() as made:
        embedding = torch.zeros(512, 64, device="cuda", dtype=torch.bfloat16)
        hidden = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
        decoder: Any = SimpleNamespace(
            _int8_scores=None, _packed_embedding=None, embedding=embedding, vocabulary=500
        )
        scores = Decoder.logits(decoder, hidden)
    assert scores.shape == (3, 500)
    assert scores.dtype == torch.float32
    assert "aten.mm.dtype" in made.names


class AsOnGpu(torch.Tensor):
    """A tensor of a CPU that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("length", [8, 1499, 1500])
def test_a_gpus_audio_keys_begin_at_multiples_of_16_bytes(length: int) -> None:
    """Else their product takes four times as long."""
    audio, weight = torch.randn(2, length, 24), torch.randn(16, 24)
    layer: Any = SimpleNamespace(cross_key=weight)
    keys = DecoderLayer.keys_of(layer, audio.as_subclass(AsOnGpu))
    torch.testing.assert_close(keys.as_subclass(torch.Tensor), DecoderLayer.keys_of(layer, audio))
    assert keys.stride() == (16 * keys.stride(1), keys.stride(1), 1)
    assert keys.stride(1) % 8 == 0, "numbers of two bytes each"
    assert keys.stride(1) - length < 8


@torch.inference_mode()
def test_gelu_within_the_product_is_gelu_within_the_rounding_of_16_bits() -> None:
    """On a GPU cuBLAS takes its approximation by tanh; on CPU torch takes the exact one."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = Linear(48, 80, gelu=True).to(device)
    linear.weight.copy_(torch.randn(80, 48) * 0.3)
    linear.bias.copy_(torch.randn(80))
    linear, x = linear.bfloat16(), torch.randn(2, 3, 48, device=device).bfloat16()
    found = linear_gelu(x, linear.weight, linear.bias)
    assert found.shape == (2, 3, 80)
    torch.testing.assert_close(found, linear(x), atol=2**-6, rtol=2**-6)


CPU = torch.device("cpu")
COUNT = 2


class Sum:
    """Ranks in threads of this process."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(COUNT)
        self._parts: dict[int, Tensor] = {}

    def of_rank(self, rank: int) -> Callable[[Tensor], None]:
        def add_up(part: Tensor) -> None:
            self._parts[rank] = part.clone()
            self._barrier.wait(60)
            total = self._parts[0] + self._parts[1]
            self._barrier.wait(60)
            part.copy_(total)

        return add_up


@torch.inference_mode()
def computed(shard: Shard) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Return the heads that a silent layer has, audio in a whole and a short window, and scores."""
    model = Whisper(SIZES, CPU, torch.float32, shard)
    model.load_hugging_face(random_weights())
    silence = model.encode_silence()
    samples = clip(1, 1.5)
    audio = model.encoder(model.log_mel([samples]))
    short = model.encoder(model.log_mel([samples], 200), silence=silence)
    cache = model.new_cache(1)
    cache.write_silence(model.decoder.cross_keys_values(silence.audio))
    cache.write_audio(0, model.decoder.cross_keys_values(short))
    tokens, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    hidden = model.decoder(tokens, positions, rows_of(cache, slice(0, 1), positions, len(PROMPT)))
    return [len(layer.biases) for layer in silence.layers], audio, short, model.decoder.logits(hidden)


def test_ranks_that_add_up_their_parts_compute_what_one_model_does() -> None:
    heads, *expected = computed(WHOLE)
    assert heads == [HEADS] * LAYERS
    sums = Sum()
    with ThreadPoolExecutor(COUNT) as pool:
        ranks = list(pool.map(lambda rank: computed(Shard(rank, COUNT, sums.of_rank(rank))), range(COUNT)))
    for heads, *found in ranks:
        assert heads == [HEADS // COUNT] * LAYERS
        for own, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(own, whole, atol=1e-3, rtol=1e-3)
    assert torch.equal(ranks[0][3], ranks[1][3]), "to the last bit: they choose the same token"


def test_each_rank_has_its_part_of_rows_columns_and_heads() -> None:
    matrix = torch.arange(24.0).view(4, 6)
    first, second = Shard(0, 2), Shard(1, 2)
    assert torch.equal(torch.cat([first.outputs(matrix), second.outputs(matrix)]), matrix)
    assert torch.equal(torch.cat([first.inputs(matrix), second.inputs(matrix)], 1), matrix)
    assert torch.equal(first.once(matrix), matrix), "added once, by the first"
    assert torch.equal(second.once(matrix), torch.zeros(4, 6))
    assert (first.heads([0, 1, 3], 4), second.heads([0, 1, 3], 4)) == ([0, 1], [1])
    assert WHOLE.heads([0, 3], 4) == [0, 3]
