"""Whether a GPU hears in recordings of people what the CPU hears: `benchmarks.parity --real ARCHIVE`.

    python -m benchmarks.real_parity ARCHIVE    writes the archive, where there is a network

What is packed is whisper-tiny.en with its weights rounded to 8 bits, so that it is small enough to travel,
and recordings of people in English. All precisions then compute with the same rounded weights. Greedy: tokens
in float32 must be the CPU's; in bfloat16 they may differ where two were nearly as likely: the difference of
their log-probabilities, in float32, is told of the first token that differs. Then as served (a beam of five,
short audio): the words wrong of both.
"""

import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from asr_server.annexes.model_sources.find import resolve_checkpoint
from asr_server.core import SAMPLE_RATE, ChunkResult, DecodingOptions, Samples
from asr_server.model.rows import rows_of
from benchmarks.reporting import Finding
from harness.engine_helpers import Checkpoint, transcribe
from harness.speech.corpora import CORPORA
from harness.speech.error_rates import total, word_errors
from harness.speech.synthesis import read_for

MODEL = "tiny.en"
SPOKEN_IN = ("recordings", "librivox", "cards", "commands", "audioeval")
SAME_SPEECH = re.compile(r"one-two-three-.*44100Hz|jfk\.(mp3|flac)")  # in another format
LONGEST_S = 30.0
READ_S, NUM_READINGS = 25.0, 6  # of a synthetic voice
NEAR_TIE = 0.25  # between the log-probabilities of two tokens; bfloat16 moves scores by 0.05 or so
WORD_TIME_S = 0.02  # a position of the encoder
WITHIN = 0.95  # of the token times of equal texts
MOST_WORDS_APART = 5


@dataclass(frozen=True)
class Recording:
    name: str
    text: str | None
    samples: Samples


# -- What travels -----------------------------------------------------------------------------------------


def pack(target: Path) -> None:
    """Writes model and recordings into one archive."""
    from ctranslate2.converters import TransformersConverter

    from harness.real_weights import hugging_face_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts: dict[str, tuple[str, str | None]] = {}
        files = ["tokenizer.json", "preprocessor_config.json"]
        converter = TransformersConverter(str(hugging_face_checkpoint(MODEL)), copy_files=files)
        converter.convert(str(folder / "model"), quantization="int8")
        for name, text, samples in map(astuple, recordings_to_pack()):
            file = f"{len(texts):03d}.flac"
            soundfile.write(folder / file, samples, SAMPLE_RATE)
            texts[file] = name, text
        (folder / "texts.json").write_text(json.dumps(texts))
        with tarfile.open(target, "w:gz", compresslevel=6) as archive:
            archive.add(folder, arcname=".")


def recordings_to_pack() -> Iterator[Recording]:
    for clip in (clip for corpus in SPOKEN_IN for clip in CORPORA[corpus]()):
        if clip.language == "en" and not SAME_SPEECH.search(clip.name):
            samples = clip.samples()
            if len(samples) <= LONGEST_S * SAMPLE_RATE:
                yield Recording(clip.name, clip.text, samples)
    reading = read_for(READ_S * NUM_READINGS).samples
    for number, part in enumerate(np.array_split(reading, NUM_READINGS)):
        yield Recording(f"reading/{number}", None, part[: round(LONGEST_S * SAMPLE_RATE)])


def unpack(archive: Path, folder: Path) -> tuple[Path, list[Recording]]:
    """The checkpoint's directory, and the recordings."""
    if not (folder / "texts.json").exists():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    texts = json.loads((folder / "texts.json").read_text())
    recordings = [
        Recording(name, text, soundfile.read(folder / file, dtype="float32")[0])
        for file, (name, text) in texts.items()
    ]
    return resolve_checkpoint(str(folder / "model")), recordings


# -- Tokens and times -------------------------------------------------------------------------------------


@torch.inference_mode()
def difference(checkpoint: Checkpoint, samples: Samples, a: ChunkResult, b: ChunkResult) -> float:
    """How far apart the log-probabilities of the first two tokens that differ lie, for `checkpoint`.

    Of a timestamp and a word, by the rule that chooses between these: all timestamps together against the
    likeliest word.
    """
    specials, model = checkpoint.tokenizer.specials, checkpoint.model
    tokens, others = ((*result.tokens, specials.end_of_text) for result in (a, b))
    first = next(i for i, (one, other) in enumerate(zip(tokens, others, strict=False)) if one != other)
    fed = torch.tensor([[specials.start_of_transcript, *tokens[:first]]])
    positions = torch.arange(fed.shape[1])[None]
    cache = model.new_cache(1)
    audio = model.encoder(model.log_mel([samples]))
    cache.write_audio(0, model.decoder.cross_keys_values(audio))
    hidden = model.decoder(fed, positions, rows_of(cache, slice(0, 1), positions, context=fed.shape[1]))
    logprobs = model.decoder.logits(hidden[:, -1])[0].log_softmax(-1)
    begin = specials.timestamp_begin
    pair = tokens[first], others[first]
    if (pair[0] >= begin) != (pair[1] >= begin):
        return float((logprobs[begin:].logsumexp(-1) - logprobs[:begin].max()).abs())
    return float((logprobs[pair[0]] - logprobs[pair[1]]).abs())


def tokens_alike(
    what: str,
    reference: Checkpoint,
    recordings: Sequence[Recording],
    found: Sequence[ChunkResult],
    expected: Sequence[ChunkResult],
    near_tie: float,
) -> Finding:
    """Holds where every text that differs does so at a near tie."""
    apart = [
        difference(reference, recording.samples, a, b)
        for recording, a, b in zip(recordings, expected, found, strict=True)
        if a.tokens != b.tokens
    ]
    shown = f"{len(found) - len(apart)} of {len(found)} alike"
    if apart:
        shown += ", the others differ first between tokens " + ", ".join(f"{each:.3f}" for each in apart)
    return Finding(what, shown, all(each < near_tie for each in apart))


def times_alike(what: str, found: Sequence[ChunkResult], expected: Sequence[ChunkResult]) -> Finding:
    """Of the texts that are alike."""
    apart = np.concatenate(
        [
            np.abs(np.subtract(a.token_times_s, b.token_times_s))
            for a, b in zip(found, expected, strict=True)
            if a.tokens == b.tokens
        ]
    )
    within = float((apart <= WORD_TIME_S + 1e-6).mean())
    shown = f"{within:.1%} of {len(apart)} token times within {WORD_TIME_S} s, {apart.max():.2f} s at most"
    return Finding(what, shown, within >= WITHIN)


# -- As served --------------------------------------------------------------------------------------------


def words_wrong(
    checkpoint: Checkpoint, recordings: Sequence[Recording], found: Sequence[ChunkResult]
) -> tuple[int, int]:
    """Words wrong and words in all, of the recordings whose words are known."""
    scores = total(
        [
            word_errors(recording.text, checkpoint.tokenizer.decode(result.tokens), "en")
            for recording, result in zip(recordings, found, strict=True)
            if recording.text is not None
        ]
    )
    return scores.errors, scores.num_words


def compare(directory: Path, recordings: Sequence[Recording], device: str) -> Iterator[Finding]:
    """Yield findings, the most telling first: a call on a GPU may be cut off."""
    clips = [recording.samples for recording in recordings]

    def heard(checkpoint: Checkpoint, **config: Any) -> list[ChunkResult]:
        engine = checkpoint.engine(num_slots=32, **config)
        try:
            return transcribe(engine, clips, DecodingOptions(word_timestamps=True))
        finally:
            engine.close()

    exact = Checkpoint.load(directory)
    expected = heard(exact)
    fast = {"lookahead": device == "cuda"}
    # The published weights are float16: the precision with fewer near ties is to be the default on a GPU.
    halves = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16,)
    for dtype in (torch.float32, *halves):
        found = heard(Checkpoint.load(directory, dtype, device), **fast)
        is_same = dtype == torch.float32
        what = f"{dtype}: the CPU's tokens in float32"
        yield tokens_alike(what, exact, recordings, found, expected, 0.01 if is_same else NEAR_TIE)
        yield times_alike(f"{dtype}: the CPU's token times in float32", found, expected)
    rounded = Checkpoint.load(directory, torch.bfloat16, device)
    theirs = words_wrong(exact, recordings, heard(exact, beam_size=5))
    ours = words_wrong(exact, recordings, heard(rounded, **fast, beam_size=5, short_audio="tail"))
    yield Finding(
        "words wrong, beam of five: the CPU in float32; here in bfloat16, short audio",
        f"{theirs[0]} and {ours[0]} of {ours[1]}",
        abs(theirs[0] - ours[0]) <= MOST_WORDS_APART,
    )


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
