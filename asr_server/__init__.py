"""A speech-to-text server that speaks OpenAI's audio API."""

__version__ = "0.1.0"
