"""Transcribe recordings for `asr-server transcribe`, here or on a server elsewhere.

Inputs go through a transcriber to outputs. Imports no torch and nothing of `api`.
"""
