"""Finds a checkpoint's files, and reports what is wrong with them before an engine starts.

Runs in every process; imports no torch, because the API process needs the tokenizer too. Loads no weights.
Used by `cli`, `api`, `dispatch`, `transcription`, `audio`, `offline`, `replica`, `engine` and `model`. Every
error is one line that says what to do.
"""
