"""OpenAI's Agents SDK, voice whole and streamed, by base URL alone. Run by test_clients.py there.

agents_client.py RECORDING BASE_URL
"""

import asyncio
import sys

import soundfile
from agents import set_tracing_disabled
from agents.voice import AudioInput, OpenAISTTModel, StreamedAudioInput, STTModelSettings
from openai import AsyncOpenAI

recording, base_url = sys.argv[1:]
BLOCK = 2400  # 0.1 s at 24 kHz


async def main() -> None:
    set_tracing_disabled(True)
    samples, rate = soundfile.read(recording, dtype="int16")
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    model = OpenAISTTModel("gpt-4o-transcribe", client)
    settings = STTModelSettings()
    print("whole:", await model.transcribe(AudioInput(samples, rate), settings, False, False))
    stream = StreamedAudioInput()
    session = await model.create_session(stream, settings, False, False)
    for at in range(0, len(samples), BLOCK):
        await stream.add_audio(samples[at : at + BLOCK])
    turns = session.transcribe_turns()
    print("live:", await anext(turns))
    await session.close()


asyncio.run(main())
