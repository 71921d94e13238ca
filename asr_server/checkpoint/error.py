"""Holds the one error of this package, in a module of its own so that all the others can raise it."""

from __future__ import annotations


class CheckpointError(Exception):
    """The checkpoint is not there, incomplete, or not Whisper. The message says what to do."""
