"""The configuration of an engine: resolve open choices for this machine; load model and tokenizer.

Runs once at the start; computes no step.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from asr_server.checkpoint.sizes import short_audio_mode
from asr_server.checkpoint.tokenizer import SpecialTokens, Tokenizer
from asr_server.config import Settings, naming, values_for
from asr_server.core import POSITIONS_PER_S
from asr_server.engine.tokens import GenerationRules
from asr_server.machine import VNNI_FLAGS, available_cores, cpu_flags, free_memory_bytes, mps_is_running
from asr_server.model import WHOLE, DecoderCache, Shard, Whisper, WhisperSizes, load_whisper
from asr_server.model.products import can_multiply_in_int8
from asr_server.process import keep_freed_memory
from asr_server.transport.messages import EngineInfo

# Positions: 11 whole windows of Whisper, or 33 chunks of 5 s. As 129 tiles of 128 rows they fill the 132
# multiprocessors of an H100; 8 chunks of 5 s would leave a fifth of them idle.
_ENCODED_ON_CUDA = 16_500
_SHORT_IN_A_WINDOW = 3  # on CUDA: most short chunks encoded in the place of a whole window
_SHORT_AT_ONCE = 8  # short chunks that a worker of the CPU encodes in one step at most
_MAX_COMPUTE_WORKERS = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, as /proc/cpuinfo spells them
MAX_SLOTS = {"cpu": 48, "cuda": 256}  # more only lengthens a step: the products are large enough by then
SLOT_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}  # of what is free once the weights are in


@dataclass(frozen=True)
class EngineConfig:
    """Only the model, its precision, `beam_size` and `short_audio` change results.

    0, "auto" and None leave the choice to `resolved`.
    """

    model: str = ""  # the checkpoint's directory; read by `Engine.load` alone
    device: str = "auto"
    dtype: str = "auto"
    num_slots: int = 0  # chunks decoded at once
    beam_size: int = 1  # most hypotheses of a chunk's beam search; 1: greedy
    encode_batch: int = 0  # chunks encoded in one step at most; on CUDA whole windows, which short ones share
    cpu_threads: int = 0
    compute_workers: int = 0  # encode batches under way at once: threads on CPU, streams on CUDA
    copy_overlap: bool = False  # CUDA: copies on streams of their own
    lookahead: bool | None = None  # whether a step starts before the results of the previous one are read
    cuda_graphs: bool = True
    kernels: str = "auto"  # torch; auto: on CUDA Triton's
    int8_audio: bool | None = None  # whether the audio's keys and values are kept in 8 bits
    num_on_device: int = 1  # engines that share the device's memory
    num_ranks: int = 1  # processes that are one engine, each with its part of the model (tensor parallelism)
    short_audio: str = "exact"  # tail: the silence after a chunk is not encoded with it; see `config.py`

    @classmethod
    def from_settings(cls, settings: Settings, num_on_device: int = 1) -> Self:
        """Return the configuration of one of `num_on_device` replicas that share cores and memory."""
        config = cls(**values_for(cls, settings))
        return replace(
            config,
            num_slots=settings.max_slots,
            cpu_threads=settings.threads_per_rank,
            num_on_device=num_on_device,
            num_ranks=settings.tensor_parallel_size,
        )

    @property
    def chunks_per_encode(self) -> int:
        """Return the most chunks of one encode batch."""
        are_shared = self.device == "cuda" and self.short_audio == "tail"
        return self.encode_batch * (_SHORT_IN_A_WINDOW if are_shared else 1)

    @property
    def num_text_slots(self) -> int:
        """Return one for each hypothesis that there may be."""
        return self.num_slots * self.beam_size

    def resolved(
        self, sizes: WhisperSizes, device: torch.device, dtype: torch.dtype, int8: bool = False
    ) -> Self:
        on_cpu = device.type == "cpu"
        workers = self.compute_workers or (
            min(_MAX_COMPUTE_WORKERS, torch.get_num_threads()) if on_cpu and self.num_ranks == 1 else 1
        )
        short_audio = short_audio_mode(self.short_audio, self.dtype)
        # On CPU a worker takes one chunk at a time: in a batch its activations would not stay in cache. But
        # it may take short ones one after another, whose prompts are then fed together.
        chunks_of_worker = 1 if short_audio == "exact" else _SHORT_AT_ONCE
        int8_audio = int8 if self.int8_audio is None else self.int8_audio
        return replace(
            self,
            device=device.type,
            dtype="int8" if int8 else str(dtype).removeprefix("torch."),
            int8_audio=int8_audio,
            num_slots=self.num_slots
            or choose_num_slots(
                sizes,
                device,
                dtype,
                free_bytes(device, self.num_on_device),
                self.num_ranks,
                int8_audio,
                num_text_slots=1 if on_cpu else self.beam_size,  # on CPU those not in use take no memory
            ),
            encode_batch=self.encode_batch
            or (workers * chunks_of_worker if on_cpu else max(1, _ENCODED_ON_CUDA // sizes.audio_positions)),
            compute_workers=workers,
            # A graph that sums over ranks is not recorded.
            cuda_graphs=self.cuda_graphs and self.num_ranks == 1,
            # On CPU there is nothing that a step could overlap with.
            lookahead=not on_cpu if self.lookahead is None else self.lookahead,
            short_audio=short_audio,
        )


def choose_device(name: str) -> torch.device:
    """Raise ValueError for a GPU that is missing or unusable."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        _check_gpu()
    return torch.device(name)


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} finds no GPU that it can use")
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise  # the device may well work at the next try
        gpu = torch.cuda.get_device_name()
        reason = f"torch {torch.__version__} was not built for this GPU, {gpu}"
        raise ValueError(f"{reason}: {naming('device')} cpu works here") from error


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Resolve `auto`: bfloat16 if the processor multiplies in it, else float32."""
    if name not in ("auto", "int8"):
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_flags() & _BFLOAT16_FLAGS else torch.float32


def choose_int8(name: str, device: torch.device) -> bool:
    """Return whether to multiply in 8-bit integers; `auto` asks the processor. Raises ValueError."""
    if name == "auto":  # with AVX2 alone products of few rows take up to twice as long as in float32
        return device.type == "cpu" and can_multiply_in_int8() and bool(cpu_flags() & VNNI_FLAGS)
    if name == "int8" and (device.type != "cpu" or not can_multiply_in_int8()):
        raise ValueError(f"{naming('dtype')} int8 needs {naming('device')} cpu and a processor with AVX2")
    return name == "int8"


def choose_num_slots(
    sizes: WhisperSizes,
    device: torch.device,
    dtype: torch.dtype,
    num_free_bytes: int,
    num_ranks: int = 1,
    int8_audio: bool = False,
    num_text_slots: int = 1,
) -> int:
    """Return the slots that a share of free memory holds, up to the number that speeds up a step."""
    share = SLOT_MEMORY_SHARE[device.type] * num_free_bytes
    # On CPU all parts of a slot lie in one memory.
    ranks_elsewhere = num_ranks if device.type == "cuda" else 1
    chunk_bytes = DecoderCache.bytes_per_chunk(sizes, dtype, int8_audio, num_text_slots) // ranks_elsewhere
    return max(1, min(MAX_SLOTS[device.type], int(share) // chunk_bytes))


def free_bytes(device: torch.device, num_on_device: int = 1) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps unused would count as taken
        free, total = torch.cuda.mem_get_info(device)
        # Not the free memory divided: what is free depends on who of them started first, or starts again.
        return min(free, total // num_on_device - torch.cuda.memory_reserved(device))
    return free_memory_bytes() // num_on_device


def engine_info(config: EngineConfig, kernels: str = "") -> EngineInfo:
    """Describe a resolved configuration to the operator; `kernels` says which are used."""
    on_gpu, no_graphs = config.device == "cuda", "" if config.cuda_graphs else ", without CUDA graphs"
    why_num_slots = "more would only lengthen a step"
    if config.num_slots != MAX_SLOTS[config.device]:
        why_num_slots = f"{SLOT_MEMORY_SHARE[config.device]:.0%} of the memory that was free"
    reasons = {
        "device": torch.cuda.get_device_name() + no_graphs if on_gpu else "no GPU was found",
        "dtype": _why_dtype(config),
        "num_slots": why_num_slots,
        "kernels": kernels,
    }
    if on_gpu and config.num_on_device > 1:
        how = "at once, through MPS" if mps_is_running() else "in turns, as no MPS daemon runs"
        reasons["num_replicas"] = f"{config.num_on_device} share a GPU {how}"
    return EngineInfo(config.device, config.dtype, config.num_slots, torch.get_num_threads(), reasons)


def _why_dtype(config: EngineConfig) -> str:
    processor = "GPU" if config.device == "cuda" else "processor"
    if config.dtype in ("bfloat16", "int8"):
        return f"the {processor} multiplies in it"
    beside = "; the audio's keys and values in int8" if config.int8_audio else ""
    return f"the {processor} has no bfloat16{beside}"


def check_timestamps(specials: SpecialTokens, sizes: WhisperSizes) -> None:
    """Raise ValueError if the vocabulary has no timestamp for the window's end."""
    last_s = (sizes.vocabulary - 1 - specials.timestamp_begin) / POSITIONS_PER_S
    window_s = sizes.window.duration_s
    if last_s < window_s:
        raise ValueError(f"the vocabulary's timestamps end at {last_s:g} s, the window at {window_s:g} s")


class Loaded(NamedTuple):
    model: Whisper
    tokenizer: Tokenizer
    rules: GenerationRules
    config: EngineConfig  # with the choices that are made before


def load(config: EngineConfig, shard: Shard = WHOLE) -> Loaded:
    """Load this share of the model.

    Raises CheckpointError, ValueError or OSError: the checkpoint is damaged, the device missing or unable.
    """
    device = choose_device(config.device)
    dtype, int8 = choose_dtype(config.dtype, device), choose_int8(config.dtype, device)
    # On a CPU that can, unless a precision is set.
    int8_audio = config.dtype in ("auto", "int8") and device.type == "cpu" and can_multiply_in_int8()
    config = replace(config, int8_audio=int8_audio)
    torch.set_num_threads(config.cpu_threads or available_cores())
    directory = Path(config.model)
    model = load_whisper(directory, device, dtype, shard, int8)
    if device.type == "cpu":
        keep_freed_memory()  # from here on: what loading needed is given back
    tokenizer, rules = Tokenizer.from_directory(directory), GenerationRules.from_directory(directory)
    check_timestamps(tokenizer.specials, model.sizes)
    return Loaded(model, tokenizer, rules, config)
