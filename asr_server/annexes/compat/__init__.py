"""Routes of other speech servers, so that their clients need only a new address.

Each module renames fields to OpenAI's and shapes the reply; none transcribes.
"""
