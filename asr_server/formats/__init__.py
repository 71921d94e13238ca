"""Transcripts in OpenAI's response formats. Knows transcripts only."""
