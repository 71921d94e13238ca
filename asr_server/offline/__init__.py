"""Transcribes recordings for `asr-server transcribe`, in this process or on a server elsewhere (`remote.py`).

Runs in the process of `asr-server transcribe`, and for `--executor ray` in actors too. Called by
`cli/transcribe.py`. Inputs go through a transcriber to outputs. Imports no torch and nothing of `api`.
"""
