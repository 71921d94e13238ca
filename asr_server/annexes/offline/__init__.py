"""Transcribe recordings for `asr-server transcribe`, here or on a server elsewhere."""
