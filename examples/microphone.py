"""Text while one speaks: the microphone, or a WAV file at its own pace, through a realtime session.

pip install 'openai[realtime]' sounddevice        # sounddevice for the microphone alone
python examples/microphone.py [--url http://127.0.0.1:8000/v1] [--file examples/speech.wav]
"""

import argparse
import asyncio
import base64
import os
import wave
from array import array
from collections.abc import AsyncIterator

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

SAMPLE_RATE = 24_000  # of OpenAI's realtime sessions: 16-bit PCM, one channel
BLOCK_S = 0.1
LAST_TURN_LIMIT_S = 60.0
BLOCKS_AHEAD = 50  # of the microphone, where the connection is slower


async def microphone() -> AsyncIterator[bytes]:
    import sounddevice

    loop = asyncio.get_running_loop()
    blocks: asyncio.Queue[bytes] = asyncio.Queue(BLOCKS_AHEAD)

    def on_block(data: bytes, *_: object) -> None:
        loop.call_soon_threadsafe(lambda: blocks.full() or blocks.put_nowait(bytes(data)))

    with sounddevice.RawInputStream(
        SAMPLE_RATE, round(SAMPLE_RATE * BLOCK_S), channels=1, dtype="int16", callback=on_block
    ):
        print("Speak. Ctrl-C ends it.")
        while True:
            yield await blocks.get()


async def recording(path: str) -> AsyncIterator[bytes]:
    """At the pace of speech, with a second of silence at the end that tells that the last turn is over."""
    with wave.open(path) as file:
        if (file.getsampwidth(), file.getnchannels()) != (2, 1):
            raise SystemExit(f"{path} must be WAV of 16 bits and one channel")
        samples = array("h", file.readframes(file.getnframes()))
        samples = at_session_rate(samples, file.getframerate()) + array("h", bytes(2 * SAMPLE_RATE))
    block_size = round(SAMPLE_RATE * BLOCK_S)
    for start in range(0, len(samples), block_size):
        yield samples[start : start + block_size].tobytes()
        await asyncio.sleep(BLOCK_S)


def at_session_rate(samples: "array[int]", rate: int) -> "array[int]":
    """Return them at 24 kHz, by linear interpolation."""
    padded = samples + samples[-1:]
    places = (divmod(index * rate, SAMPLE_RATE) for index in range(len(samples) * SAMPLE_RATE // rate))
    return array(
        "h",
        (padded[place] + (padded[place + 1] - padded[place]) * part // SAMPLE_RATE for place, part in places),
    )


async def send(connection: AsyncRealtimeConnection, blocks: AsyncIterator[bytes]) -> None:
    async for block in blocks:
        await connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())


async def show(connection: AsyncRealtimeConnection, open_turns: set[str]) -> None:
    """What is recognised while one speaks, and a line for each turn when it is over."""
    async for event in connection:
        if event.type == "input_audio_buffer.speech_started":
            open_turns.add(event.item_id)
        elif event.type == "conversation.item.input_audio_transcription.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "conversation.item.input_audio_transcription.completed":
            print(f"\n> {event.transcript}", flush=True)
            open_turns.discard(event.item_id)
        elif event.type == "error":
            raise SystemExit(event.error.message)


async def main(url: str, file: str | None) -> None:
    client = AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    async with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        open_turns: set[str] = set()
        showing = asyncio.create_task(show(connection, open_turns))
        await send(connection, recording(file) if file else microphone())
        async with asyncio.timeout(LAST_TURN_LIMIT_S):
            while open_turns and not showing.done():
                await asyncio.sleep(0.1)
        showing.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--file")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.file))
