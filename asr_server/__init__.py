"""A speech-to-text server that speaks OpenAI's audio API.

Imported in every process; imports nothing of ours.
"""

__version__ = "0.1.0"
