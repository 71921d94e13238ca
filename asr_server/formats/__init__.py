"""Transcripts in OpenAI's response formats, for the HTTP API and for the command line.

Runs in the API process or that of `asr-server transcribe`. Knows transcripts only, not what made them.
"""
