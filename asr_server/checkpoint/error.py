"""Holds the errors of this package, in a module of their own so that all the others can raise them."""

from __future__ import annotations


class CheckpointError(Exception):
    """The checkpoint is not there, incomplete, or not Whisper. The message says what to do."""


class NotFetched(Exception):
    """A source does not have the model, or cannot be reached. The message says why in a few words."""
