"""The systems that `benchmarks.peers` compares, each behind one function: clips in, number of tokens out.

python -m benchmarks.systems TASK       for every line on standard input, one run; prints its seconds as JSON
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from asr_server.core import SAMPLE_RATE, ChunkId, DecodingOptions, Result, Samples, Submit
from benchmarks.peers import Setting, Work, make_clips

Run = Callable[[list[Samples]], int]  # returns the number of tokens


def ours(setting: Setting, work: Work) -> Run:
    from asr_server.engine import Engine, EngineConfig

    engine = Engine(EngineConfig(work.checkpoint, "cpu", setting.dtype, cpu_threads=work.threads))
    options = DecodingOptions(language="en", max_new_tokens=work.tokens)

    def run(clips: list[Samples]) -> int:
        for i, clip in enumerate(clips):
            engine.handle(Submit(ChunkId(str(i), 0), clip, options))
        count = 0
        while engine.has_work:
            count += sum(len(event.result.tokens) for event in engine.step() if isinstance(event, Result))
        return count

    return run


def transformers(setting: Setting, work: Work) -> Run:
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.set_num_threads(work.threads)
    dtype = getattr(torch, setting.dtype)
    model: Any = WhisperForConditionalGeneration.from_pretrained(work.checkpoint, dtype=dtype)
    model.eval().generation_config.max_length = None
    extractor: Any = WhisperFeatureExtractor.from_pretrained(work.checkpoint)

    def run(clips: list[Samples]) -> int:
        count = 0
        for start in range(0, len(clips), setting.batch):
            batch = clips[start : start + setting.batch]
            features = extractor(batch, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features.to(
                dtype
            )
            with torch.inference_mode():
                tokens = model.generate(
                    features,
                    language="en",
                    task="transcribe",
                    max_new_tokens=work.tokens,
                    num_beams=1,
                    do_sample=False,
                    force_unique_generate_call=True,
                )
            count += sum(len(row) - 4 for row in tokens.tolist())  # without the prompt
        return count

    return run


def faster_whisper(setting: Setting, work: Work) -> Run:
    from faster_whisper import WhisperModel

    model = WhisperModel(
        work.converted, device="cpu", compute_type=setting.dtype, cpu_threads=work.threads, num_workers=1
    )
    pipeline = _counting_pipeline(model)
    suppressed = json.loads((Path(work.checkpoint) / "generation_config.json").read_text())["suppress_tokens"]

    def run(clips: list[Samples]) -> int:
        pipeline.num_tokens = 0
        starts = np.cumsum([0, *(len(clip) for clip in clips)]) / SAMPLE_RATE
        segments, _ = pipeline.transcribe(
            np.concatenate(clips),
            language="en",
            beam_size=1,
            best_of=1,
            temperature=[0.0],
            suppress_tokens=suppressed,
            without_timestamps=True,
            vad_filter=False,
            clip_timestamps=[{"start": start, "end": end} for start, end in pairwise(starts)],
            max_new_tokens=2 * work.tokens - 4,  # CTranslate2 stops at half of this and the prompt together
            batch_size=setting.batch,
        )
        for _ in segments:
            pass
        return int(pipeline.num_tokens)

    return run


def _counting_pipeline(model: Any) -> Any:
    from faster_whisper import BatchedInferencePipeline

    class Counting(BatchedInferencePipeline):  # type: ignore[misc]
        """Counts what was generated: its segments drop tokens that random weights put at odd places."""

        num_tokens = 0

        def generate_segment_batched(self, *arguments: Any) -> Any:
            encoded, outputs = super().generate_segment_batched(*arguments)
            self.num_tokens += sum(len(output["tokens"]) for output in outputs)
            return encoded, outputs

    return Counting(model)


SYSTEMS = {"ours": ours, "transformers": transformers, "faster_whisper": faster_whisper}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    task = json.loads(sys.argv[1])
    setting, work = Setting(**task["setting"]), Work(**task["work"])
    run = SYSTEMS[setting.system](setting, work)
    clips = make_clips(work)
    for _ in sys.stdin:
        started, cpu_started = time.perf_counter(), time.process_time()
        count = run(clips)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        expected = work.clips * work.tokens
        assert count == expected, f"{setting} made {count} tokens, not {expected}"
        print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
