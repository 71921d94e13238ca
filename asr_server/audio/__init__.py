"""Decodes recordings of any format to 16 kHz mono and cuts them into chunks, in threads of its own.

Runs in threads of the API process (or of `asr-server transcribe`) and, for FFmpeg, in processes of its own.
Used by `transcription`, `api`, `realtime`, `wyoming.py` and `offline`. Knows neither HTTP nor the engine.
"""
