"""The systems that `benchmarks.shapes` compares: each loads, then does all the work whenever it is called.

Ours is there twice. `ours` gets arrays as the peers do. `ours_http` is the whole server in a process of its
own and gets the same clips as 16-bit wav files, all posted at once; as always it decodes with timestamps.

python -m benchmarks.shape_systems TASK    one run for every line it reads; prints its seconds as JSON
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from asr_server.channel.messages import Result, Submit
from asr_server.core import SAMPLE_RATE, ChunkId, DecodingOptions, Samples
from benchmarks.client import Client, connected, transcribe
from benchmarks.running_server import running_server
from benchmarks.shapes import Setting, Work, make_clips
from benchmarks.uploads import wav

Clips = Sequence[Samples]
Run = Callable[[], int]  # returns the number of tokens


@contextmanager
def ours(setting: Setting, work: Work, clips: Clips) -> Iterator[Run]:
    from asr_server.engine import Engine, EngineConfig

    engine = Engine.load(
        EngineConfig(work.checkpoint, work.device, setting.dtype, work.slots, cpu_threads=work.threads)
    )
    options = DecodingOptions(language="en", max_new_tokens=work.tokens)

    def run() -> int:
        for i, clip in enumerate(clips):
            engine.handle(Submit(ChunkId(str(i), 0), clip, options))
        count = 0
        while engine.has_work:
            count += sum(len(event.result.tokens) for event in engine.step() if isinstance(event, Result))
        return count

    yield run
    engine.close()


@contextmanager
def ours_http(setting: Setting, work: Work, clips: Clips) -> Iterator[Run]:
    files = [wav(clip) for clip in clips]
    fields = {"language": "en", "max_completion_tokens": str(work.tokens)}
    arguments = ["--device", work.device, "--dtype", setting.dtype, "--max-slots", str(work.slots)]
    # What random weights say is always in doubt; a trained model's texts seldom are.
    arguments += ["--cpu-threads", str(work.threads), "--no-check-voice"]

    async def post_all(client: Client) -> int:
        answers = [transcribe(client, f"{i}.wav", file, fields) for i, file in enumerate(files)]
        return sum(answer.num_tokens for answer in await asyncio.gather(*answers))

    with running_server(work.checkpoint, *arguments) as url, asyncio.Runner() as loop:
        connection = connected(url)
        client = loop.run(connection.__aenter__())
        yield lambda: loop.run(post_all(client))
        loop.run(connection.__aexit__(None, None, None))


@contextmanager
def transformers(setting: Setting, work: Work, clips: Clips) -> Iterator[Run]:
    import torch
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    torch.set_num_threads(work.threads)
    dtype = getattr(torch, setting.dtype)
    model: Any = WhisperForConditionalGeneration.from_pretrained(work.checkpoint, dtype=dtype)
    model.eval().to(work.device).generation_config.max_length = None
    extractor: Any = WhisperFeatureExtractor.from_pretrained(work.checkpoint)

    def run() -> int:
        count = 0
        for start in range(0, len(clips), setting.batch):
            features = extractor(
                clips[start : start + setting.batch],
                sampling_rate=SAMPLE_RATE,
                return_tensors="pt",
                device=work.device,
            ).input_features
            with torch.inference_mode():
                tokens = model.generate(
                    features.to(work.device, dtype),
                    language="en",
                    task="transcribe",
                    max_new_tokens=work.tokens,
                    num_beams=1,
                    do_sample=False,
                    force_unique_generate_call=True,
                )
            count += sum(len(row) - 4 for row in tokens.tolist())  # without the prompt
        return count

    yield run


System = Callable[[Setting, Work, Clips], AbstractContextManager[Run]]
SYSTEMS: dict[str, System] = {
    "ours": ours,
    "ours_http": ours_http,
    "transformers": transformers,
}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    task = json.loads(sys.argv[1])
    setting, work = Setting(**task["setting"]), Work(**task["work"])
    with SYSTEMS[setting.system](setting, work, make_clips(work)) as run:
        for _ in sys.stdin:
            started, cpu_started = time.perf_counter(), time.process_time()
            count = run()
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
            expected = work.clips * work.tokens
            assert count == expected, f"{setting} made {count} tokens, not {expected}"
            print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
