"""LiteLLM's transcription call, by base URL alone. Run by test_clients.py in LiteLLM's own environment.

litellm_client.py RECORDING BASE_URL
"""

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one from the network

import litellm
import openai

recording, base_url = sys.argv[1:]
common = {"model": "openai/whisper-1", "api_base": base_url, "api_key": "none"}

with open(recording, "rb") as file:
    print("json:", litellm.transcription(file=file, **common).text)
with open(recording, "rb") as file:
    verbose = litellm.transcription(
        file=file, response_format="verbose_json", timestamp_granularities=["word"], **common
    )
    print("words:", " ".join(word["word"] for word in verbose.words))
with open(recording, "rb") as file:
    print("srt:", "-->" in litellm.transcription(file=file, response_format="srt", **common).text)
with open(recording, "rb") as file:
    print("async:", asyncio.run(litellm.atranscription(file=file, **common)).text)
with open(recording, "rb") as file:
    print("stream:", litellm.transcription(file=file, stream=True, **common).text)
with open(__file__, "rb") as file:
    try:
        litellm.transcription(file=file, **common)
    except openai.BadRequestError as error:
        print("refused:", error.status_code)
