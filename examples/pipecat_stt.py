"""pipecat's OpenAI speech-to-text services on this server: one that sends whole turns, one that is live.

pip install 'pipecat-ai[openai]'
python examples/pipecat_stt.py RECORDING [BASE_URL]

The recording stands for a transport's microphone, and two frames for a voice activity detector: in a
pipeline of your own these come from `transport.input()` and from pipecat's VAD processor.
"""

import asyncio
import os
import sys
import wave
from collections.abc import AsyncIterator

from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InputAudioRawFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
from pipecat.services.stt_service import STTService
from pipecat.workers.runner import WorkerRunner

FRAME_S = 0.05
LAST_TURN_LIMIT_S = 60.0


class Show(FrameProcessor):
    """Prints what was said."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label
        self.has_shown = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            print(f"{self._label}: {frame.text}", flush=True)
            self.has_shown.set()
        await self.push_frame(frame, direction)


async def spoken(path: str) -> AsyncIterator[Frame]:
    """A WAV file of 16 bits and one channel as one turn, at the pace of speech."""
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    yield VADUserStartedSpeakingFrame()
    step = 2 * round(rate * FRAME_S)
    for at in range(0, len(data), step):
        yield InputAudioRawFrame(data[at : at + step], rate, 1)
        await asyncio.sleep(FRAME_S)
    yield VADUserStoppedSpeakingFrame()


async def transcribe(service: STTService, label: str, path: str, sample_rate: int) -> None:
    show = Show(label)
    pipeline = Pipeline([service, show])
    params = PipelineParams(audio_in_sample_rate=sample_rate)
    worker = PipelineWorker(pipeline, params=params, cancel_on_idle_timeout=False)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _on_started(worker: PipelineWorker, frame: Frame) -> None:
        started.set()

    async def feed() -> None:
        await started.wait()
        await asyncio.sleep(0.5)  # for the session to open
        async for frame in spoken(path):
            await worker.queue_frame(frame)
        async with asyncio.timeout(LAST_TURN_LIMIT_S):
            await show.has_shown.wait()
        await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), feed())


async def main(path: str, base_url: str) -> None:
    api_key = os.environ.get("OPENAI_API_KEY", "none")
    with wave.open(path) as file:
        sample_rate = file.getframerate()
    await transcribe(OpenAISTTService(base_url=base_url, api_key=api_key), "whole", path, sample_rate)
    realtime_url = base_url.replace("http", "ws", 1) + "/realtime"
    live = OpenAIRealtimeSTTService(base_url=realtime_url, api_key=api_key)
    await transcribe(live, "live", path, sample_rate)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"))
