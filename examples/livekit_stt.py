"""LiveKit's OpenAI speech-to-text on this server: once for a whole recording, once live.

pip install livekit-agents livekit-plugins-openai
python examples/livekit_stt.py RECORDING [BASE_URL]

In an agent: `AgentSession(stt=openai.STT(base_url=..., use_realtime=True), ...)`.
"""

import asyncio
import os
import sys
import wave

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import openai

FRAME_S = 0.05
LAST_TURN_LIMIT_S = 60.0


def frames_of(path: str) -> list[rtc.AudioFrame]:
    """A WAV file of 16 bits and one channel, with a second of silence behind it."""
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    data += bytes(2 * rate)
    step = 2 * round(rate * FRAME_S)
    parts = (data[at : at + step] for at in range(0, len(data), step))
    return [rtc.AudioFrame(part, rate, 1, len(part) // 2) for part in parts]


async def transcribe_whole(base_url: str, api_key: str, frames: list[rtc.AudioFrame]) -> None:
    recogniser = openai.STT(base_url=base_url, api_key=api_key)
    event = await recogniser.recognize(frames)
    print("whole:", event.alternatives[0].text)


async def transcribe_live(base_url: str, api_key: str, frames: list[rtc.AudioFrame]) -> None:
    """Prints the final text of each turn; what comes before, while one speaks, is in interim events."""
    recogniser = openai.STT(base_url=base_url, api_key=api_key, use_realtime=True)
    stream = recogniser.stream()
    num_open = 0  # turns whose text has not come yet

    async def show() -> None:
        nonlocal num_open
        async for event in stream:
            if event.type == stt.SpeechEventType.START_OF_SPEECH:
                num_open += 1
            elif event.type == stt.SpeechEventType.RECOGNITION_USAGE:
                num_open -= 1
            elif event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                print("live:", event.alternatives[0].text)

    showing = asyncio.create_task(show())
    for frame in frames:
        stream.push_frame(frame)
        await asyncio.sleep(FRAME_S)
    async with asyncio.timeout(LAST_TURN_LIMIT_S):
        while num_open:
            await asyncio.sleep(0.1)
    await stream.aclose()
    await showing
    await recogniser.aclose()


async def main(path: str, base_url: str) -> None:
    api_key = os.environ.get("OPENAI_API_KEY", "none")
    async with utils.http_context.open():  # an agent's job has one already
        frames = frames_of(path)
        await transcribe_whole(base_url, api_key, frames)
        await transcribe_live(base_url, api_key, frames)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"))
