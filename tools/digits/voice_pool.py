"""The voices that training draws from: what each one says, and how often each group of them is heard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .clips import Clip, ClipStore
from .noises import Random

_MIN_DIFFERENT_DIGITS = 5


@dataclass
class Voice:
    """What one voice says: single digits by digit, runs of digits, and speech without digits."""

    digits: dict[str, list[Clip]] = field(default_factory=lambda: defaultdict(list))
    runs: list[Clip] = field(default_factory=list)
    others: list[Clip] = field(default_factory=list)

    def add(self, clip: Clip) -> None:
        """Put a clip where it belongs."""
        if not clip.digits:
            self.others.append(clip)
        elif len(clip.digits) == 1:
            self.digits[clip.digits].append(clip)
        else:
            self.runs.append(clip)

    def next_clip(self, max_digits: int, rng: Random) -> Clip:
        """A single digit, or (one time in four where the voice has any) a run of at most ``max_digits``."""
        if self.runs and rng.random() < 0.25:
            run = self.runs[rng.integers(len(self.runs))]
            if len(run.digits) <= max_digits:
                return run
        known = list(self.digits)
        takes = self.digits[known[rng.integers(len(known))]]
        return takes[rng.integers(len(takes))]


@dataclass
class VoicePool:
    """Voices in groups (an engine, the recordings), each group drawn with its weight."""

    groups: dict[str, list[Voice]]
    weights: dict[str, float]

    def __post_init__(self) -> None:
        present = {name: voices for name, voices in self.groups.items() if self.weights.get(name, 0) > 0}
        self.speakers = self._non_empty(
            {
                n: [v for v in voices if len(v.digits) >= _MIN_DIFFERENT_DIGITS]
                for n, voices in present.items()
            }
        )
        self.talkers = self._non_empty({n: [v for v in voices if v.others] for n, voices in present.items()})
        self.speaker_chances = self._chances(self.speakers)
        self.talker_chances = self._chances(self.talkers)

    @staticmethod
    def _non_empty(groups: dict[str, list[Voice]]) -> dict[str, list[Voice]]:
        return {name: voices for name, voices in groups.items() if voices}

    def _chances(self, groups: Iterable[str]) -> list[float]:
        total = sum(self.weights[name] for name in groups)
        return [self.weights[name] / total for name in groups]

    def voice(self, rng: Random) -> Voice:
        """A random voice that has at least five different digits."""
        return self._draw(self.speakers, self.speaker_chances, rng)

    def other(self, rng: Random) -> Clip:
        """Speech without digits by anybody."""
        others = self._draw(self.talkers, self.talker_chances, rng).others
        return others[rng.integers(len(others))]

    @staticmethod
    def _draw(groups: dict[str, list[Voice]], chances: list[float], rng: Random) -> Voice:
        voices = groups[list(groups)[rng.choice(len(chances), p=chances)]]
        return voices[rng.integers(len(voices))]


def load_voice_pool(
    cache: Path, weights: dict[str, float], left_out_speaker: str | None, is_held_out: Callable[[str], bool]
) -> VoicePool:
    """All clips in the cache that may train, grouped by the first part of the voice's name."""
    groups: dict[str, dict[str, Voice]] = defaultdict(lambda: defaultdict(Voice))
    for path in sorted(cache.glob("*/*.npz")):
        if path.name.endswith(".partial.npz"):
            continue
        for clip in ClipStore.load(path).clips:
            engine, speaker = clip.voice.split("/")[:2]
            if engine in weights and not is_held_out(clip.voice) and speaker != left_out_speaker:
                groups[engine][clip.voice].add(clip)
    return VoicePool({engine: list(voices.values()) for engine, voices in groups.items()}, weights)
