"""OpenAI's own package, whichever version this environment has, by base URL alone. Run by test_clients.py.

openai_client.py RECORDING BASE_URL
"""

import asyncio
import pathlib
import sys

import openai

recording, base_url = sys.argv[1:]
common = {"base_url": base_url, "api_key": "none"}
client = openai.OpenAI(**common)
is_of_httpx2 = any(each.__module__.startswith("httpx2") for each in type(client._client).__mro__)


def transcribe(**options):
    with open(recording, "rb") as file:
        return client.audio.transcriptions.create(file=file, **{"model": "whisper-1"} | options)


async def transcribe_in_a_task():
    async with openai.AsyncOpenAI(**common) as own:
        path = pathlib.Path(recording)
        return await own.audio.transcriptions.create(file=path, model="gpt-4o-mini-transcribe")


print("library:", "httpx2" if is_of_httpx2 else "httpx")
print("json:", transcribe().text)
verbose = transcribe(response_format="verbose_json", timestamp_granularities=["word", "segment"])
print("words:", " ".join(word.word for word in verbose.words))
print("srt:", "-->" in transcribe(response_format="srt"))
print("text:", transcribe(response_format="text").strip())
events = list(transcribe(model="gpt-4o-transcribe", stream=True))
print("stream:", "".join(event.delta for event in events if event.type == "transcript.text.delta"))
print("async:", asyncio.run(transcribe_in_a_task()).text)
with open(__file__, "rb") as file:
    try:
        client.audio.transcriptions.create(file=file, model="whisper-1")
    except openai.BadRequestError as error:
        print("refused:", error.status_code, error.param)
print("models:", "whisper-1" in {model.id for model in client.models.list()})
