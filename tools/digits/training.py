"""The training loop: batches from another process, one cycle of the learning rate, a state on disk."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Full

import torch
from torch import nn
from tqdm import tqdm

from .batches import Batch, make_batch
from .judging import JudgedSet, append_to_curve, judge
from .losses import Learner
from .network import make_network
from .plans import LOSS_WEIGHTS, Plan
from .vocabulary import Vocabulary
from .voice_pool import VoicePool

EMA_DECAY = 0.996


def _produce(queue: Queue[Batch], pool: VoicePool, plan: Plan, first_step: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's, under which its exit would wait for us
    words, parent = Vocabulary(), os.getppid()
    for step in range(first_step, plan.steps):
        batch = make_batch(pool, plan.mixture(step), (plan.seed, step), words)
        while not _offer(queue, batch):
            if os.getppid() != parent:  # the trainer was killed
                return


def _offer(queue: Queue[Batch], batch: Batch) -> bool:
    try:
        queue.put(batch, timeout=5)
    except Full:
        return False
    return True


def batches(pool: VoicePool, plan: Plan, first_step: int) -> Iterator[Batch]:
    """Batches from ``first_step`` on, made ahead by another process."""
    context = multiprocessing.get_context("fork")  # the clips are shared, not copied
    queue: Queue[Batch] = context.Queue(maxsize=12)
    producer = context.Process(target=_produce, args=(queue, pool, plan, first_step), daemon=True)
    producer.start()
    for _ in range(first_step, plan.steps):
        yield queue.get()
    producer.join()


def learning_rate(plan: Plan, step: int) -> float:
    """A rise over at most 100 steps, the peak, and a straight fall to a hundredth.

    The fall takes the last third of a plan from nothing, and all of one that begins with another's weights.
    """
    rise, fall = min(100.0, 0.04 * plan.steps), plan.steps if plan.begins_with else plan.steps / 3
    left = min(1.0, (plan.steps - step) / fall)
    return plan.peak_rate * min(1.0, (step + 1) / rise) * (0.01 + 0.99 * left)


@dataclass
class Run:
    """State of a run that is kept on disk: learner, its moving average, optimiser, step."""

    plan: Plan
    folder: Path
    learner: Learner
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    recent: dict[str, float] = field(default_factory=dict)
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
        """Go on from the state on disk, where there is one, or begin with another plan's weights."""
        if not self.checkpoint.exists() and self.plan.begins_with:
            start = torch.load(self.folder / f"{self.plan.begins_with}.pt")
            self.learner.load_state_dict(start["average"])
            self.average = start["average"]
        elif self.checkpoint.exists():
            state = torch.load(self.checkpoint)
            self.step, self.average = state["step"], state["average"]
            self.learner.load_state_dict(state["learner"])
            self.optimiser.load_state_dict(state["optimiser"])

    def update(self, batch: Batch) -> None:
        """One step; its losses go into ``recent``, a moving average."""
        torch.manual_seed(self.plan.seed * 1_000_003 + self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.plan, self.step)
        losses = self.learner(batch, self.plan.phase(self.step).frames_only, self.plan.spoiled(self.step))
        loss = torch.stack([self.plan.loss_weight(n, self.step) * value for n, value in losses.items()]).sum()
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.learner.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1
        self._follow({name: value.item() for name, value in losses.items()})

    def _follow(self, losses: dict[str, float]) -> None:
        """Bring the moving averages of weights and losses up to date."""
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        for name, value in self.learner.state_dict().items():
            self.average[name].lerp_(value, 1 - decay)
        for name, loss in losses.items():
            self.recent[name] = loss + 0.97 * (self.recent.get(name, loss) - loss)

    def judge(self, sets: list[JudgedSet]) -> dict[str, float]:
        """Error rates of the averaged weights, also written to the curve."""
        averaged = Learner(make_network(self.learner.words), self.learner.words)
        averaged.load_state_dict(self.average)
        averaged.eval()
        rates: dict[str, float] = {}
        for windows in sets:
            rates |= judge(averaged, windows, frames_only=self.plan.phase(self.step - 1).frames_only)
        losses = {name: self.recent.get(name, math.nan) for name in sorted(LOSS_WEIGHTS)}
        append_to_curve(self.folder / f"{self.plan.name}-curve.csv", self.step, losses, rates)
        return rates


def train(
    plan: Plan,
    pool: VoicePool,
    sets: list[JudgedSet],
    folder: Path,
    num_threads: int,
    save_every_s: float = 120.0,
) -> Path:
    """Run (or resume) a plan; returns the checkpoint's path."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(plan.seed)
    words = Vocabulary()
    run = Run(plan, folder, Learner(make_network(words), words))
    run.resume()
    run.learner.train()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ends through ``finally`` below
    saved_at = time.monotonic()
    try:
        with tqdm(total=plan.steps, initial=run.step, desc=plan.name, mininterval=10, smoothing=0.05) as bar:
            for batch in batches(pool, plan, run.step):
                run.update(batch)
                bar.set_postfix({k: f"{v:.3f}" for k, v in run.recent.items()}, refresh=False)
                bar.update()
                if run.step % plan.judge_every == 0 or run.step == plan.steps:
                    run.judge(sets)
                if time.monotonic() - saved_at > save_every_s:
                    run.save()
                    saved_at = time.monotonic()
    finally:
        run.save()
    return run.checkpoint
