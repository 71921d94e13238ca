"""What of the embedded model's training needs no voices: what a batch holds, a run that is resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tools.digits.batches import IGNORED, UNKNOWN, Batch, Mixture, make_batch
from tools.digits.clips import SAMPLE_RATE, Clip
from tools.digits.losses import Learner, look_loss
from tools.digits.network import HEAD_OFFSETS, MAX_TOKENS, make_network
from tools.digits.plans import EXAMINED, PLANS, WIDENED, Plan
from tools.digits.training import Run
from tools.digits.vocabulary import Vocabulary
from tools.digits.voice_pool import Voice, VoicePool
from tools.digits.windows import Said, Shape, segments

WORDS = Vocabulary()
SMALL = Mixture(Shape(1.6, 4, 1.6), num_rows=3, severity=0.0, empty_share=0.0, prompt_share=0.5)


def tone(pitch_hz: float, digits: str, duration_s: float = 0.25) -> Clip:
    times_s = np.arange(int(duration_s * SAMPLE_RATE)) / SAMPLE_RATE
    samples = (8000 * np.sin(2 * np.pi * pitch_hz * times_s)).astype(np.int16)
    return Clip(samples, digits, "tones/one/plain", 0, len(samples))


@pytest.fixture(scope="module")
def pool() -> VoicePool:
    """One voice that says each digit as a tone of its own, and one thing that is no digit."""
    voice = Voice()
    for digit in range(10):
        voice.add(tone(200 + 100 * digit, str(digit)))
    voice.add(tone(90, ""))
    return VoicePool({"tones": [voice]}, {"tones": 1.0})


def batch(pool: VoicePool, step: int = 0, mixture: Mixture = SMALL) -> Batch:
    return make_batch(pool, mixture, (7, step), WORDS)


def test_a_batch_is_drawn_from_its_seed_alone(pool: VoicePool) -> None:
    first, again, other = batch(pool, 1), batch(pool, 1), batch(pool, 2)
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True))
    assert not np.array_equal(first.samples, other.samples)


def test_the_decoder_writes_the_digits_that_the_encoder_should_hear(pool: VoicePool) -> None:
    for step in range(10):
        made = batch(pool, step)
        for targets, spoken, count in zip(made.targets, made.ctc, made.ctc_lengths, strict=True):
            written = WORDS.decode_digits([token for token in targets.tolist() if token != IGNORED])
            assert written == "".join(map(str, spoken[:count]))


def test_a_prompt_is_read_and_never_a_target(pool: VoicePool) -> None:
    always = Mixture(SMALL.shape, 4, severity=0.0, prompt_share=1.0)
    made = batch(pool, 3, always)
    for tokens, targets, places in zip(made.tokens, made.targets, made.places, strict=True):
        start = tokens.tolist().index(WORDS.sot)
        assert tokens[0] == WORDS.prev
        assert (targets[:start] == IGNORED).all()
        assert targets[start] != IGNORED
        assert places.max() < MAX_TOKENS


def test_other_text_is_spelled_by_its_own_bytes() -> None:
    pieces = {token: piece for piece, token in WORDS.pieces.items()}
    assert "".join(pieces[token] for token in WORDS.encode_bytes("né one")) == "ĠnÃ©Ġone"


def test_a_digit_sounds_where_its_token_is_to_look_and_where_its_frames_say_so(pool: VoicePool) -> None:
    for step in range(10):
        made = batch(pool, step)
        for row in range(len(made.targets)):
            for target, (first, last) in zip(made.targets[row], made.spans[row], strict=True):
                if target in WORDS.digits:
                    sound = made.samples[row, first * 320 + 320 : last * 320 - 320]
                    assert np.abs(sound).max() > 0
                    inner = made.frames[row, first + 3 : last - 3]  # neighbours may overlap a little
                    assert set(inner.tolist()) <= {UNKNOWN, WORDS.digits.index(target) + 1}


def test_digits_less_than_a_pause_apart_are_one_segment() -> None:
    said = [Said("1", 0.0, 0.3), Said("2", 0.8, 1.0), Said("34", 1.7, 2.0)]
    assert segments(said) == [Said("12", 0.0, 1.0), Said("34", 1.7, 2.0)]


def test_attention_on_the_right_place_costs_nothing() -> None:
    attention = torch.zeros(1, 2, 2, 10)
    attention[..., 4] = 1.0
    right, wrong = torch.tensor([[[3, 6], [0, 0]]]), torch.tensor([[[5, 9], [0, 0]]])
    assert look_loss(attention, right) < 0.01 < look_loss(attention, wrong)


def test_each_head_of_a_fresh_encoder_looks_its_number_of_positions_away() -> None:
    encoder = make_network(WORDS).model.encoder
    positions = encoder.embed_positions.weight.detach()
    for layer, offsets in zip(encoder.layers, HEAD_OFFSETS, strict=True):
        heads = (len(positions), len(offsets), -1)
        query = (layer.self_attn.q_proj(positions) - layer.self_attn.q_proj.bias).view(heads)
        key = layer.self_attn.k_proj(positions).view(heads)
        looked_at = torch.einsum("qhc,khc->hqk", query, key).argmax(dim=-1)[:, 30:-30]
        for row, offset in zip(looked_at, offsets, strict=True):
            distances = row - torch.arange(30, len(positions) - 30)
            assert (distances - offset).abs().float().mean() < 1


def test_the_encoders_first_layers_learn_alone_before_the_others_join(pool: VoicePool) -> None:
    learner, toy = Learner(make_network(WORDS), WORDS), batch(pool, 1)
    encoder = learner.network.model.encoder
    learner(toy, frames_only=True)["frame"].backward()
    assert encoder.layers[0].fc1.weight.grad is not None
    assert encoder.layers[-1].fc2.weight.grad is None
    torch.stack(list(learner(toy).values())).sum().backward()  # type: ignore[no-untyped-call]
    assert encoder.layers[-1].fc2.weight.grad is not None


def test_every_plan_draws_a_mixture_at_each_of_its_steps() -> None:
    for plan in PLANS.values():
        for step in range(0, plan.steps, max(1, plan.steps // 50)):
            assert plan.mixture(step).num_rows > 0


def test_a_plan_may_begin_with_the_averaged_weights_of_another(tmp_path: Path) -> None:
    first = Run(EXAMINED, tmp_path, Learner(make_network(WORDS), WORDS))
    first.average["ctc_head.bias"].fill_(7.0)
    first.save()
    second = Run(WIDENED, tmp_path, Learner(make_network(WORDS), WORDS))
    second.resume()
    assert second.step == 0
    assert (second.learner.ctc_head.bias == 7).all()
    assert (second.average["ctc_head.bias"] == 7).all()


def test_a_run_that_is_resumed_ends_with_the_weights_it_would_have_had(
    pool: VoicePool, tmp_path: Path
) -> None:
    plan = Plan("toy", 4, 1e-3, EXAMINED.phases, {"tones": 1.0})

    def run(folder: Path, steps: int) -> Run:
        torch.manual_seed(plan.seed)
        made = Run(plan, folder, Learner(make_network(WORDS), WORDS))
        made.resume()
        while made.step < steps:
            made.update(batch(pool, made.step))
        made.save()
        return made

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4)
    assert resumed.step == 4
    for name, value in whole.average.items():
        torch.testing.assert_close(resumed.average[name], value)
