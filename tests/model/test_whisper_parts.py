"""The model's parts on a CPU: norms and limits, silence behind short audio, embeddings and scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asr_server.model import Whisper
from asr_server.model.kernels import TORCH, Kernels
from asr_server.model.layers import Linear
from asr_server.model.rows import rows_of
from asr_server.model.sizes import WHOLE, Shard
from asr_server.model.whisper import Decoder, Encoder, add_norm, norm_product
from tests.engine.small import HEADS, LAYERS, PROMPT, SIZES, VOCABULARY, WIDTH, clip, random_weights, small

CPU = torch.device("cpu")


def made(sizes: Any = SIZES, int8: bool = False) -> Whisper:
    model = Whisper(sizes, CPU, torch.float32, int8=int8)
    model.load_hugging_face(random_weights())
    return model.eval().requires_grad_(False)


# -- Sums and norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_is_added_and_the_sum_is_normed_within_float16s_range(dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(4).requires_grad_(False).to(dtype)
    x = torch.tensor([[1.0, 60000.0, -60000.0, 3.0]]).to(dtype)
    change = torch.tensor([2.0, 30000.0, -30000.0, -1.0]).to(dtype)
    total, normed = add_norm(x, change, norm, TORCH)
    largest = 64504 if dtype == torch.float16 else 90000
    torch.testing.assert_close(
        total.float(), torch.tensor([[3.0, largest, -largest, 2.0]]), atol=0, rtol=0.01
    )
    assert torch.equal(normed, norm(total))
    limits: list[float | None] = []

    def kernel(*given: Any) -> tuple[Tensor, Tensor]:
        limits.append(given[-1])
        return given[0], given[1]

    assert add_norm(x, change, norm, Kernels(add_norm=kernel)) == (x, change)
    assert limits == [64504.0 if dtype == torch.float16 else None]


@pytest.mark.parametrize(
    ("shape", "packs", "by_kernel"),
    [((1, 1, 4), False, True), ((2, 1, 4), False, False), ((1, 1, 4), True, False)],
)
def test_a_kernel_norms_and_multiplies_one_row_of_weights_that_it_can_read(
    shape: tuple[int, ...], packs: bool, by_kernel: bool
) -> None:
    linear, norm = Linear(4, 3).requires_grad_(False), nn.LayerNorm(4).requires_grad_(False)
    linear.weight.copy_(torch.randn(3, 4))
    if packs:
        linear.pack()
    packed = linear.is_packed
    calls: list[tuple[Any, ...]] = []

    def kernel(x: Tensor, change: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return x + change, linear(norm(x + change))

    x, change = torch.randn(2, *shape)
    expected = x + change, linear(norm(x + change))
    for kernels in (TORCH, Kernels(norm_product=kernel)):
        for found, wanted in zip(norm_product(x, change, norm, linear, kernels), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    assert len(calls) == (by_kernel or (packs and not packed))


# -- The encoder ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_convolutions_of_short_audio_see_its_last_frame_go_on() -> None:
    model, seen = made(), list[Tensor]()
    silence = model.encode_silence()
    model.encoder.conv1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    mel = model.log_mel([clip(1, 1.0)], 100)
    short = model.encoder(mel, silence=silence)
    alone = model.encoder(mel)
    assert short.shape == alone.shape == (1, 50, WIDTH)
    frames = mel.transpose(1, 2)
    assert torch.equal(seen[0], torch.cat([frames, frames[:, -1:].expand(-1, 2, -1)], 1))
    assert torch.equal(seen[1], frames)
    assert not torch.allclose(short, alone), "it attends to silence, too"


@torch.inference_mode()
def test_a_whole_window_has_no_silence_behind_it() -> None:
    model = made()
    silence, mel = model.encode_silence(), model.log_mel([clip(1, 3.0)])
    assert torch.equal(model.encoder(mel, silence=silence), model.encoder(mel))


@torch.inference_mode()
def test_silence_is_encoded_as_a_window_of_zeros_and_layers_are_watched_no_longer() -> None:
    model = made()
    silence = model.encode_silence()
    zeros = model.encoder(model.log_mel([np.zeros(48_000, np.float32)]))
    torch.testing.assert_close(silence.audio, zeros)
    assert len(silence.layers) == LAYERS
    layers: Any = model.encoder.layers
    assert not any(layer.qkv._forward_hooks for layer in layers)


@pytest.mark.parametrize("padding", ["silence", "zeros"])
def test_spectrograms_are_padded_as_the_checkpoint_asks(padding: str) -> None:
    model = Whisper(replace(SIZES, window=replace(SIZES.window, padding=padding)), CPU, torch.float32)
    assert model.log_mel.pads_with_zeros is (padding == "zeros")


# -- The decoder ----------------------------------------------------------------------------------------


@torch.inference_mode()
def decoded(model: Whisper) -> Tensor:
    """Scores of the tokens that follow the prompt's, [T, vocabulary]."""
    cache = model.new_cache(1)
    cache.write_audio([0], model.decoder.cross_keys_values(model.encoder(model.log_mel([clip(1)]))))
    tokens, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    hidden = model.decoder(tokens, positions, rows_of(cache, slice(0, 1), positions, len(PROMPT)))
    return model.decoder.logits(hidden)[0]


def test_without_options_all_products_are_in_the_precision_of_the_model() -> None:
    model = Whisper(SIZES, CPU, torch.float32)
    assert not model.int8
    for decoder in (model.decoder, Decoder(SIZES, WHOLE)):
        assert decoder._int8_scores is None


def test_products_are_packed_when_they_are_loaded() -> None:
    linear = Linear(4, 4)
    linear.pack()
    assert {each.is_packed for each in made().modules() if isinstance(each, Linear)} == {linear.is_packed}


def test_scores_in_8_bits_are_near_those_in_float32_but_for_what_all_share() -> None:
    exact, rounded = decoded(made()).log_softmax(-1), decoded(made(int8=True)).log_softmax(-1)
    assert exact.shape == rounded.shape == (len(PROMPT), VOCABULARY)
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.std()


@pytest.mark.parametrize("int8", [False, True])
def test_embeddings_that_scores_do_not_read_take_half_the_memory_where_float16_is_exact(int8: bool) -> None:
    weights = random_weights()
    weights["decoder.embed_tokens.weight"] = weights["decoder.embed_tokens.weight"].half().float()
    model = Whisper(SIZES, CPU, torch.float32, int8=int8)
    model.load_hugging_face(weights)
    is_read = not int8 and model.decoder._packed_embedding is None
    assert model.decoder.embedding.dtype == (torch.float32 if is_read else torch.float16)


@pytest.mark.parametrize("scales", [False, True])
def test_embeddings_are_multiplied_by_the_root_of_the_width_where_a_checkpoint_asks(scales: bool) -> None:
    decoder = made(replace(SIZES, scale_embedding=scales)).decoder
    tokens, positions = torch.tensor([[1, 2]]), torch.tensor([[0, 5]])
    weights = random_weights()
    embedded, of_positions = decoder._embed(tokens, positions)
    expected = F.embedding(tokens, weights["decoder.embed_tokens.weight"])
    torch.testing.assert_close(embedded, expected * (WIDTH**0.5 if scales else 1))
    torch.testing.assert_close(
        of_positions, F.embedding(positions, weights["decoder.embed_positions.weight"])
    )


def test_a_gpus_scores_have_a_place_of_their_own() -> None:
    decoder = small().model.decoder
    assert decoder.new_scores(3) is None
    with torch.no_grad(), FakeTensorMode():
        on_gpu: Any = nn.Module()
        on_gpu.embedding = torch.zeros(256, 8, device="cuda")
        scores = Decoder.new_scores(on_gpu, 3)
    assert scores is not None
    assert (scores.shape, scores.device.type) == ((3, 256), "cuda")


def test_heads_may_be_four_as_well_as_two() -> None:
    sizes = replace(SIZES, encoder_heads=2 * HEADS, decoder_heads=2 * HEADS)
    assert decoded(made(sizes)).isfinite().all()


def test_a_model_is_split_among_ranks_that_divide_it() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        Whisper(SIZES, CPU, torch.float32, Shard(0, 3))
    assert Encoder(SIZES, Shard(0, 2))._num_heads == HEADS // 2
