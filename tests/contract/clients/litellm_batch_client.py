"""LiteLLM's files and batches, by base URL alone. Run by test_clients.py in LiteLLM's own environment.

litellm_batch_client.py RECORDING BASE_URL
"""

import json
import os
import sys
import time

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one from the network

import litellm

litellm.suppress_debug_info = True  # a list of its providers, amid what is printed here

recording, base_url = sys.argv[1:]
common = {"custom_llm_provider": "openai", "api_base": base_url, "api_key": "none"}
endpoint = "/v1/audio/transcriptions"

with open(recording, "rb") as file:
    talk = litellm.create_file(file=file, purpose="user_data", **common)
body = {"model": "whisper-1", "file_id": talk.id}
line = {"custom_id": "talk", "method": "POST", "url": endpoint, "body": body}
lines = litellm.create_file(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch", **common)
batch = litellm.create_batch(
    input_file_id=lines.id, endpoint=endpoint, completion_window="24h", metadata={"case": "7"}, **common
)
while batch.status == "in_progress":
    time.sleep(0.05)
    batch = litellm.retrieve_batch(batch.id, **common)
print("batch:", batch.status, batch.metadata["case"], batch.request_counts.completed)
output = json.loads(litellm.file_content(batch.output_file_id, **common).content)
print("text:", output["custom_id"], output["response"]["body"]["text"])
print("listed:", batch.id in [each.id for each in litellm.list_batches(**common).data])
print("deleted:", litellm.file_delete(talk.id, **common).deleted)
