"""Choose the next token for a batch: apply Whisper's rules, then take the likeliest or draw one.

The rules are openai/whisper's (decoding.py); generation_config.json names their tokens. Each row draws by
its temperature, top-k, top-p, min-p and penalties. Knows no requests.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr_server.checkpoint.files import read_json
from asr_server.checkpoint.tokenizer import SpecialTokens
from asr_server.core import ChunkId
from asr_server.engine.boost import Row
from asr_server.engine.slots import Choice, SlotState
from asr_server.model.kernels import Kernels
from asr_server.model.whisper import padded_vocabulary

_NEVER = float("-inf")
ALWAYS, AT_BEGIN = 1, 2  # when a token is suppressed, as bits; the kernel knows them too


@dataclass(frozen=True)
class GenerationRules:
    """The tokens that generation_config.json, or an older config.json, forbids."""

    suppress: tuple[int, ...] = ()  # always
    suppress_at_begin: tuple[int, ...] = ()  # as the first token
    max_initial_timestamp: int | None = None  # in steps of a timestamp token; None: no limit

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        path = directory / "generation_config.json"
        path = path if path.exists() else directory / "config.json"
        config = read_json(path)
        return cls(
            suppress=tuple(config.get("suppress_tokens") or ()),
            suppress_at_begin=tuple(config.get("begin_suppress_tokens") or ()),
            max_initial_timestamp=config.get("max_initial_timestamp_index"),
        )


class TokenRules:
    """Set forbidden scores to minus infinity, without a loop over chunks."""

    def __init__(
        self, rules: GenerationRules, specials: SpecialTokens, vocabulary: int, device: torch.device
    ) -> None:
        self.vocabulary = vocabulary
        self._suppress = _ids((*rules.suppress, specials.no_timestamps), vocabulary, device)
        self._suppress_at_begin = _ids(rules.suppress_at_begin, vocabulary, device)
        self._end_of_text = specials.end_of_text
        self._first_time = specials.timestamp_begin
        self._times = torch.arange(specials.timestamp_begin, vocabulary, device=device)
        limit = rules.max_initial_timestamp
        self._last_initial_time = vocabulary if limit is None else specials.timestamp_begin + limit
        # The same for the kernel: in which cases each token is suppressed, and the tokens that are borders.
        cases = torch.zeros(padded_vocabulary(vocabulary, device), dtype=torch.int8)
        cases[self._suppress.cpu()] |= ALWAYS
        cases[self._suppress_at_begin.cpu()] |= AT_BEGIN
        self.suppressed = cases.to(device)
        self.limits = (self._end_of_text, self._first_time, self._last_initial_time)

    def apply(self, scores: Tensor, state: SlotState) -> None:
        """Change `scores` [B, vocabulary] in place."""
        scores.index_fill_(1, self._suppress, _NEVER)
        begin = state.num_generated == 0  # [B]
        at_begin = scores[:, self._suppress_at_begin]
        scores[:, self._suppress_at_begin] = at_begin.masked_fill_(begin[:, None], _NEVER)
        self._apply_to_timestamps(scores, state, begin)

    def _apply_to_timestamps(self, scores: Tensor, state: SlotState, begin: Tensor) -> None:
        after_time = ~begin & (state.token >= self._first_time)
        after_two = after_time & ((state.num_generated < 2) | (state.previous >= self._first_time))
        after_one = after_time & ~after_two  # of a pair: text must not follow

        # Times never go back; after a closed pair they must move on.
        earliest = torch.where(after_one, state.last_time, state.last_time + 1)
        times_off = (self._times < earliest[:, None]) | after_two[:, None]
        times_off |= begin[:, None] & (self._times > self._last_initial_time)
        times = scores[:, self._first_time :]
        times.masked_fill_(times_off, _NEVER)

        # Where all times together are likelier than any one other token, a time it is.
        text, special = scores[:, : self._end_of_text], scores[:, self._end_of_text : self._first_time]
        best_text = text.amax(-1).masked_fill_(after_one, _NEVER)
        time_wins = begin | (times.logsumexp(-1) > torch.maximum(best_text, special.amax(-1)))
        _forbid(text, after_one | time_wins)
        _forbid(special, time_wins)


def _forbid(scores: Tensor, rows: Tensor) -> None:
    """Set rows, a bool [B], to minus infinity, by a vectorised sum."""
    scores.add_(torch.zeros(rows.shape, device=rows.device).masked_fill_(rows, _NEVER)[:, None])


def _ids(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    return torch.tensor(
        [token for token in tokens if 0 <= token < vocabulary], dtype=torch.long, device=device
    )


NOISE_SEED_BITS: Final = 53  # a slot's beginnings cross to the device as doubles
# SplitMix64 (Steele, Lea and Flood 2014), its factors as torch's signed integers; products wrap around.
_INCREMENT: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS: Final = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def noise_seed_of(seed: int, id: ChunkId, temperature: float) -> int:
    """Return the random seed of one try, equal in every process."""
    key = hashlib.blake2b(struct.pack("<qqqd", seed, id.chunk, id.part, temperature), digest_size=8).digest()
    return int.from_bytes(key, "little") >> (64 - NOISE_SEED_BITS)


_CPU_ROWS = 8


def rows_at_once(num_rows: int, device: torch.device) -> Iterator[slice]:
    """Yield blocks of rows: all on a GPU, eight on CPU, where a draw needs 2 MB a row."""
    size = num_rows if device.type == "cuda" else _CPU_ROWS
    for start in range(0, num_rows, max(1, size)):
        yield slice(start, min(start + size, num_rows))


def log_probabilities(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities [B] of tokens [B] under scores [B, vocabulary]."""
    found = torch.empty(len(scores), device=scores.device)
    for rows in rows_at_once(len(scores), scores.device):
        likely = scores[rows].log_softmax(-1)  # half the time of logsumexp
        found[rows] = likely.gather(1, tokens[rows, None])[:, 0]
    return found


_BLOCK = 128


def top_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores and their tokens, [B, count] each.

    The CPU searches the blocks with the largest maxima, in a third of the time. With 1, the first of
    equals wins.
    """
    whole = scores.shape[1] // _BLOCK * _BLOCK
    if scores.is_cuda or whole < count * _BLOCK:
        return _largest(scores, count)
    blocks = _largest(scores[:, :whole].view(len(scores), -1, _BLOCK).amax(-1), count)[1]
    in_blocks = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    behind = torch.arange(whole, scores.shape[1]).expand(len(scores), -1)
    tokens = torch.cat([in_blocks, behind], dim=1)
    largest, places = _largest(scores.gather(1, tokens), count)
    return largest, tokens.gather(1, places)


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, indices = scores.max(-1, keepdim=True) if count == 1 else scores.topk(count)
    return values, indices


def penalise(scores: Tensor, state: SlotState, end_of_text: int) -> Tensor:
    """Lower the scores of generated text tokens.

    Repetition follows CTRL (Keskar et al. 2019); frequency and presence OpenAI's API.
    """
    counts = torch.zeros_like(scores)
    seen = torch.arange(len(state.generated), device=scores.device) < state.num_generated[:, None]
    counts.scatter_add_(1, state.generated.t(), seen.to(scores.dtype))
    counts[:, end_of_text:] = 0
    present = counts > 0
    factor = state.repetition_penalty[:, None]
    repeated = torch.where(scores > 0, scores / factor, scores * factor)
    scores = torch.where(present, repeated, scores)
    scores = scores - state.frequency_penalty[:, None] * counts
    return scores - state.presence_penalty[:, None] * present


def draw(scores: Tensor, state: SlotState, restricted: bool = True) -> Tensor:
    """Draw one token a row, by the largest sum of score and noise (Gumbel 1954).

    Noise belongs to a token, so scores that differ in the last digit seldom change the draw. Only rows that
    are restricted, by top-k, top-p or min-p, need sorting.
    """
    scores = scores / state.temperature[:, None]
    if restricted:
        scores = _restrict(scores, state)
    return (scores + _gumbel_noise(state, scores.shape[1])).argmax(-1)


def _gumbel_noise(state: SlotState, vocabulary: int) -> Tensor:
    tokens = torch.arange(1, vocabulary + 1, device=state.noise_seed.device)
    counter = state.num_generated[:, None] * vocabulary + tokens
    bits = state.noise_seed[:, None] + counter * _INCREMENT
    bits = (bits ^ _shifted(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shifted(bits, 27)) * _FACTORS[1]
    bits = bits ^ _shifted(bits, 31)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift right with zeros: torch's shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _restrict(scores: Tensor, state: SlotState) -> Tensor:
    vocabulary = scores.shape[1]
    probabilities, order = scores.softmax(-1).sort(dim=-1, descending=True)
    rank = torch.arange(vocabulary, device=scores.device)
    top_k = torch.where(state.top_k > 0, state.top_k, vocabulary)[:, None]
    top_p = state.top_p[:, None]
    before = probabilities.cumsum(-1) - probabilities
    kept = (rank < top_k) & ((before < top_p) | (top_p >= 1))
    kept &= probabilities >= state.min_p[:, None] * probabilities[:, :1]
    kept |= rank == 0
    return scores.masked_fill(~kept.scatter(1, order, kept), float("-inf"))


def padded_rows(rows: Sequence[Row], width: int = 1) -> tuple[Tensor, Tensor]:
    """Return the tokens that keywords name in each row, and their bonuses: [B, `width` or more] each."""
    tensors = [_tensors(row, width) for row in rows]
    tokens = pad_sequence([tokens for tokens, _ in tensors], batch_first=True)
    return tokens, pad_sequence([bonuses for _, bonuses in tensors], True, _NEVER)


@lru_cache(maxsize=4096)
def _tensors(row: Row, width: int) -> tuple[Tensor, Tensor]:
    """Keep what it made: a row of 64 keywords has some 200 tokens, and comes again in nearly every step."""
    missing = max(0, width - len(row.tokens))
    tokens, bonuses = [*row.tokens, *[0] * missing], [*row.bonuses, *[_NEVER] * missing]
    return torch.tensor(tokens, dtype=torch.long), torch.tensor(bonuses)


class Named(NamedTuple):
    """Tokens that keywords name: [B, most of a row] each."""

    tokens: Tensor
    logprobs: Tensor
    bonuses: Tensor  # at least 0; -inf where a row has fewer tokens


def choose_boosted(tokens: Tensor, logprobs: Tensor, named: Named) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens [B] with bonuses, and their log-probabilities; given those without."""
    boosted, places = (named.logprobs + named.bonuses).max(-1, keepdim=True)
    wins = boosted[:, 0] > logprobs
    token, logprob = named.tokens.gather(1, places)[:, 0], named.logprobs.gather(1, places)[:, 0]
    return torch.where(wins, token, tokens), torch.where(wins, logprob, logprobs)


def likeliest_named(named: Named, likeliest: Tensor, count: int) -> Tensor:
    """Return named tokens beside the likeliest ones [B, candidates]: [2 * count, B], tokens, then numbers.

    Places without a token have the log-probability -inf. `named` has `count` columns or more.
    """
    is_likeliest = (named.tokens[:, :, None] == likeliest[:, None]).any(-1)
    boosted = (named.logprobs + named.bonuses).masked_fill(is_likeliest, _NEVER)
    largest, places = boosted.topk(count)
    logprobs = named.logprobs.gather(1, places).masked_fill(largest == _NEVER, _NEVER)
    return torch.cat([named.tokens.gather(1, places).to(logprobs.dtype), logprobs], 1).t()


def choose_likeliest(
    kernels: Kernels, rules: TokenRules, scores: Tensor, state: SlotState, choice: Choice
) -> None:
    """Write tokens and log-probabilities, [B], and candidates, [2 * count, B]: tokens, then numbers.

    Torch applies the rules to `scores` in place; the kernel leaves `scores` and inactive rows unchanged.
    """
    tokens, logprobs, candidates = choice
    if kernels.choose_token is None:
        rules.apply(scores, state)
        tokens.copy_(top_scores(scores, 1)[1][:, 0])
        logprobs.copy_(log_probabilities(scores, tokens))
        if count := len(candidates) // 2:
            largest, likeliest = top_scores(scores, count)
            candidates[:count] = likeliest.t()
            candidates[count:] = (largest - largest[:, :1] + logprobs[:, None]).t()
        return
    kernels.choose_token(scores, rules.suppressed, state.integers, *rules.limits, *choice)
