"""Transcribes what a manifest lists, a recording a line, for `asr-server transcribe --manifest`.

The manifest is read as it is needed and never held. `run.py` does it with the pipeline of this process,
`ray_run.py` with a pool of actors over a Ray cluster; both take an entry to its results with
`line_transcriber.py`.
"""
