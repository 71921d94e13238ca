"""Replicas of the engine: how they are started, watched, replaced, and given work.

The transcription package talks to `dispatcher.py` alone.
"""
