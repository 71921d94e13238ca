"""LiveKit's Deepgram speech-to-text on this server: a whole recording, and live.

python livekit_deepgram_client.py RECORDING BASE_URL
"""

import asyncio
import sys
import wave

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import deepgram

FRAME_S = 0.05


async def main(path: str, base_url: str) -> None:
    with wave.open(path) as file:
        rate, data = file.getframerate(), file.readframes(file.getnframes())
    data += bytes(2 * rate)
    step = 2 * round(rate * FRAME_S)
    parts = (data[at : at + step] for at in range(0, len(data), step))
    frames = [rtc.AudioFrame(part, rate, 1, len(part) // 2) for part in parts]
    async with utils.http_context.open():
        recogniser = deepgram.STT(base_url=f"{base_url}/listen", api_key="none", sample_rate=rate)
        event = await recogniser.recognize(frames)
        print("whole:", event.alternatives[0].text)
        stream = recogniser.stream()

        async def show() -> None:
            async for each in stream:
                if each.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                    print("live:", each.alternatives[0].text, len(each.alternatives[0].words or []))

        showing = asyncio.create_task(show())
        for frame in frames:
            stream.push_frame(frame)
            await asyncio.sleep(FRAME_S)
        stream.end_input()
        await showing
        await recogniser.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
