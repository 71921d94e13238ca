"""Where a checkpoint's files are, and what is wrong with them, before anything heavy starts.

Runs in every process; imports no torch, because the API process needs the tokenizer too. Loads no weights.
Used by `cli`, `api`, `dispatch`, `transcription`, `audio`, `offline`, `replica`, `engine` and `model`. Every
error is one line that says what to do.
"""
