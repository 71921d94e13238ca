"""The API process's side of the replicas: which chunk goes to which, and how they are started and replaced.

Runs in the API process (or that of `asr-server transcribe`), on the event loop, which it never blocks.
`transcription` gives its chunks to `dispatcher.py` through `queue.RequestHandle`; `api` and `offline` start
and stop it. Knows no HTTP, file or text. Nothing here imports torch but `inline.py`.
"""
