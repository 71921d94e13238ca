"""Tells the voices of a recording apart: who speaks when, and whose each word is.

Runs in threads of its own in the API process (or that of `asr-server transcribe`), on onnxruntime; imports no
torch. Used by `transcription`, `api`, `offline` and `cli`. Knows no HTTP.
"""
