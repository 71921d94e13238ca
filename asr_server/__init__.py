"""A speech-to-text server that speaks OpenAI's audio API."""

__version__ = "1.0.0"
