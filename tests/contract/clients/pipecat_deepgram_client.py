"""pipecat's Deepgram speech-to-text service on this server, live.

python pipecat_deepgram_client.py RECORDING BASE_URL
"""

import asyncio
import sys
import wave
from pathlib import Path

from pipecat.services.deepgram.stt import DeepgramSTTService

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from pipecat_stt import transcribe


async def main(path: str, base_url: str) -> None:
    with wave.open(path) as file:
        sample_rate = file.getframerate()
    service = DeepgramSTTService(api_key="none", base_url=base_url, sample_rate=sample_rate)
    await transcribe(service, "live", path, sample_rate)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
