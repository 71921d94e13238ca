"""The training loop: batches from a process of their own, three losses, one cycle of the learning rate."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Full

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import WhisperForConditionalGeneration

from .clips import ClipStore
from .mixing import Batch, Choir, Shape, Voice, make_batch
from .network import NUM_CTC_CLASSES, LogMel, decode, encode, make_network
from .vocabulary import NUM_TIMESTAMPS, Vocabulary

CTC_WEIGHT = 1.5
EMA_DECAY = 0.998
_TIMESTAMP_KERNEL = ((-2, 0.1), (-1, 0.2), (0, 0.4), (1, 0.2), (2, 0.1))


@dataclass(frozen=True)
class Plan:
    """One stage of training.

    The learning rate falls over ``steps``; the run ends after ``stop_at`` of them where that is given.
    ``exclude`` names a speaker whose recordings stay out.
    """

    name: str
    steps: int
    peak_rate: float
    seed: int
    weights: dict[str, float]
    curriculum: tuple[tuple[float, tuple[tuple[Shape, int], ...]], ...]
    exclude: str | None = None
    start_from: Path | None = None
    stop_at: int | None = None

    @property
    def last_step(self) -> int:
        """How many steps are made."""
        return self.stop_at or self.steps


def _short(sound_s: float, max_digits: int, rows: int) -> tuple[Shape, int]:
    return Shape(sound_s, max_digits, sound_s), rows


WHOLE = (Shape(30.0, 64, 30.0), 4)
"""Windows as they are at inference, and how many in a batch."""

PADDED = (Shape(12.0, 26, 16.0), 7)
"""On the way there: sound, then zeros, at a third of the cost."""

FROM_NOTHING = (
    (0.05, (_short(1.6, 1, 64),)),
    (0.10, (_short(2.4, 2, 48),)),
    (0.17, (_short(3.2, 4, 36),)),
    (0.45, (_short(4.0, 8, 30), _short(3.2, 8, 36))),
    (0.70, (_short(4.0, 10, 30), _short(6.0, 14, 20), _short(9.0, 20, 14))),
    (1.01, (_short(4.0, 10, 30), _short(8.0, 18, 15), PADDED, WHOLE)),
)
"""(share of the steps, shapes drawn from until then): one digit a window, then more and longer."""

FROM_PRETRAINED = (
    (0.20, (_short(3.2, 8, 36), _short(5.0, 12, 24), _short(8.0, 18, 15))),
    (0.60, (_short(4.0, 10, 30), _short(8.0, 18, 15), PADDED)),
    (1.01, (_short(8.0, 18, 15), PADDED, PADDED, WHOLE)),
)


def shape_at(plan: Plan, step: int) -> tuple[Shape, int]:
    """Shape and rows of this step's batch."""
    share = step / plan.steps
    choices = next(shapes for until, shapes in plan.curriculum if share < until)
    return choices[np.random.default_rng((plan.seed, step, 1)).integers(len(choices))]


def severity_at(plan: Plan, step: int) -> float:
    """Share of windows with a channel and noise: rises over the first fifth where nothing is known yet."""
    return 1.0 if plan.start_from else min(1.0, 0.2 + 4 * step / plan.steps)


def load_choir(cache: Path, plan: Plan, is_held_out: Callable[[str], bool]) -> Choir:
    """All clips that may train in this plan, grouped by the first part of the voice's name."""
    groups: dict[str, dict[str, Voice]] = defaultdict(lambda: defaultdict(Voice))
    for path in sorted(cache.glob("*/*.npz")):
        if path.name.endswith(".partial.npz"):
            continue
        for clip in ClipStore.load(path).clips:
            engine, speaker = clip.voice.split("/")[:2]
            if engine in plan.weights and not is_held_out(clip.voice) and speaker != plan.exclude:
                groups[engine][clip.voice].add(clip)
    return Choir({engine: list(voices.values()) for engine, voices in groups.items()}, plan.weights)


def _produce(queue: Queue[Batch], choir: Choir, plan: Plan, first_step: int) -> None:
    words, parent = Vocabulary(), os.getppid()
    for step in range(first_step, plan.last_step):
        shape, rows = shape_at(plan, step)
        batch = make_batch(choir, shape, rows, severity_at(plan, step), (plan.seed, step), words)
        while not _offer(queue, batch):
            if os.getppid() != parent:  # the trainer was killed
                return


def _offer(queue: Queue[Batch], batch: Batch) -> bool:
    try:
        queue.put(batch, timeout=5)
    except Full:
        return False
    return True


def batches(choir: Choir, plan: Plan, first_step: int) -> Iterator[Batch]:
    """Batches from ``first_step`` on, made ahead by another process."""
    context = multiprocessing.get_context("fork")  # the clips are shared, not copied
    queue: Queue[Batch] = context.Queue(maxsize=12)
    producer = context.Process(target=_produce, args=(queue, choir, plan, first_step), daemon=True)
    producer.start()
    for _ in range(first_step, plan.last_step):
        yield queue.get()
    producer.join()


class Learner(nn.Module):
    """The network, the CTC head that helps the encoder to begin (thrown away in the end), and the losses."""

    def __init__(self, network: WhisperForConditionalGeneration, words: Vocabulary) -> None:
        super().__init__()
        self.network, self.words = network, words
        self.ctc_head = nn.Linear(network.config.d_model, NUM_CTC_CLASSES)
        self.log_mel = LogMel()

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The losses of one batch by name."""
        features = mask(warp(self.log_mel(torch.from_numpy(batch.samples).float() / 32768)))
        with torch.autocast("cpu", torch.bfloat16):
            encoded = encode(self.network, features, torch.from_numpy(batch.shift))
            logits = decode(self.network, encoded, torch.from_numpy(batch.tokens))
            ctc_logits = self.ctc_head(encoded)
        return {
            "ctc": self._ctc(ctc_logits.float(), batch),
            **self._next_token(logits.float(), torch.from_numpy(batch.targets)),
        }

    def _ctc(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        lengths = torch.full((len(logits),), logits.shape[1])
        spoken = torch.from_numpy(batch.ctc_lengths)
        log_p = logits.log_softmax(2).transpose(0, 1)
        losses = nn.functional.ctc_loss(
            log_p, torch.from_numpy(batch.ctc) + 1, lengths, spoken, reduction="none", zero_infinity=True
        )
        # Per digit, with every half second of the window counted as one: empty windows weigh like others.
        return (losses / (spoken + logits.shape[1] / 25)).mean()

    def _next_token(self, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        begin = self.words.timestamp_begin
        is_time, is_text = targets >= begin, (targets >= 0) & (targets < begin)
        text = nn.functional.cross_entropy(logits[is_text], targets[is_text])
        if not is_time.any():
            return {"text": text, "time": text.new_zeros(())}
        log_p, steps = logits[is_time].log_softmax(1), targets[is_time] - begin
        time_loss = torch.zeros(len(steps))
        for offset, weight in _TIMESTAMP_KERNEL:
            near = (steps + offset).clamp(0, NUM_TIMESTAMPS - 1) + begin
            time_loss = time_loss - weight * log_p.gather(1, near[:, None])[:, 0]
        return {"text": text, "time": time_loss.mean()}


def warp(features: torch.Tensor) -> torch.Tensor:
    """Stretch the frequency axis of each row by 0.88 to 1.14, as a longer or shorter vocal tract would."""
    rows, bins, _ = features.shape
    ratio = torch.exp(torch.empty(rows, 1).uniform_(math.log(0.88), math.log(1.14)))
    place = (torch.arange(bins)[None, :] * ratio).clamp(0, bins - 1)
    lower = place.floor().long().clamp(max=bins - 2)
    share = (place - lower)[:, :, None]
    index = lower[:, :, None].expand(-1, -1, features.shape[2])
    return features.gather(1, index) * (1 - share) + features.gather(1, index + 1) * share


def mask(features: torch.Tensor) -> torch.Tensor:
    """SpecAugment (Park and others, 2019): up to two bands of 12 bins and one gap of 80 ms in each second."""
    rows, bins, frames = features.shape
    floor = features.mean(dim=(1, 2), keepdim=True)
    hidden = torch.zeros(rows, bins, frames, dtype=torch.bool)
    for _ in range(2):
        first, width = torch.randint(0, bins, (rows, 1)), torch.randint(0, 13, (rows, 1))
        place = torch.arange(bins)[None, :]
        hidden |= ((place >= first) & (place < first + width))[:, :, None]
    for _ in range(max(1, frames // 200)):
        first, width = torch.randint(0, frames, (rows, 1)), torch.randint(0, 9, (rows, 1))
        place = torch.arange(frames)[None, :]
        hidden |= ((place >= first) & (place < first + width))[:, None, :]
    return torch.where(hidden, floor, features)


def learning_rate(plan: Plan, step: int) -> float:
    """A linear rise over 6 % of the steps, then half a cosine down to a hundredth."""
    rise = 0.06 * plan.steps
    if step < rise:
        return plan.peak_rate * (step + 1) / rise
    share = (step - rise) / (plan.steps - rise)
    return plan.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass
class Run:
    """State of a run that is kept on disk: learner, its moving average, optimiser, step."""

    plan: Plan
    folder: Path
    learner: Learner
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.AdamW(self._parameter_groups(), lr=0.0, betas=(0.9, 0.98), eps=1e-6)
        self.average = {k: v.clone() for k, v in self.learner.state_dict().items()}

    def _parameter_groups(self) -> list[dict[str, object]]:
        trained = [p for p in self.learner.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.02},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]

    @property
    def checkpoint(self) -> Path:
        """Where the state lies."""
        return self.folder / f"{self.plan.name}.pt"

    def save(self) -> None:
        """Write the state, whole or not at all."""
        state = {
            "step": self.step,
            "learner": self.learner.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Go on from the state on disk, or from the averaged weights of the stage before."""
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint)
            self.step, self.average = state["step"], state["average"]
            self.learner.load_state_dict(state["learner"])
            self.optimiser.load_state_dict(state["optimiser"])
        elif self.plan.start_from is not None:
            self.average = torch.load(self.plan.start_from)["average"]
            self.learner.load_state_dict(self.average)
            self.average = {k: v.clone() for k, v in self.average.items()}

    def update(self, batch: Batch) -> dict[str, float]:
        """One step; returns the losses."""
        torch.manual_seed(self.plan.seed * 1_000_003 + self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.plan, self.step)
        losses = self.learner(batch)
        loss = losses["text"] + 0.4 * losses["time"] + CTC_WEIGHT * losses["ctc"]
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        for name, value in self.learner.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)
        return {name: value.item() for name, value in losses.items()}


def train(plan: Plan, choir: Choir, folder: Path, num_threads: int, save_every_s: float = 120.0) -> Path:
    """Run (or resume) one stage; returns the checkpoint's path."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(plan.seed)
    words = Vocabulary()
    run = Run(plan, folder, Learner(make_network(words), words))
    run.resume()
    run.learner.train()
    saved_at, smooth = time.monotonic(), dict[str, float]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ends through ``finally`` below
    try:
        with tqdm(
            total=plan.last_step, initial=run.step, desc=plan.name, mininterval=10, smoothing=0.05
        ) as bar:
            for batch in batches(choir, plan, run.step):
                for name, value in run.update(batch).items():
                    smooth[name] = value if name not in smooth else 0.97 * smooth[name] + 0.03 * value
                bar.set_postfix({k: f"{v:.3f}" for k, v in smooth.items()}, refresh=False)
                bar.update()
                if time.monotonic() - saved_at > save_every_s:
                    run.save()
                    saved_at = time.monotonic()
    finally:
        run.save()
    return run.checkpoint
