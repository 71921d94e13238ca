"""The API process's side of the replicas: which chunk goes to which, and how they are started and replaced.

`transcription` talks to `dispatcher.py` alone. Nothing here imports torch but `inline.py`.
"""
