"""Transcripts in OpenAI's response formats, for the HTTP API and for the command line."""
