"""Transcribes recordings for `asr-server transcribe`, in this process or on a server elsewhere (`remote.py`).

Inputs go through a transcriber, one recording at a time, to outputs. Imports no torch and none of `api`.
"""
