"""OpenAI's Python client: text, the times of words, and text as it comes.

pip install openai
python examples/openai_python.py [RECORDING] [BASE_URL]
"""

import os
import sys
from pathlib import Path

from openai import OpenAI

recording = Path(sys.argv[1] if len(sys.argv) > 1 else "examples/speech.wav")
base_url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000/v1"

client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))

answer = client.audio.transcriptions.create(file=recording, model="whisper-1")
print(answer.text)

verbose = client.audio.transcriptions.create(
    file=recording,
    model="whisper-1",
    response_format="verbose_json",
    timestamp_granularities=["word", "segment"],
)
for word in verbose.words or []:
    print(f"{word.start:7.2f} {word.end:7.2f} {word.word}")

stream = client.audio.transcriptions.create(file=recording, model="whisper-1", stream=True)
for event in stream:
    if event.type == "transcript.text.delta":
        print(event.delta, end="", flush=True)
print()
