"""Diarization: who speaks when, and who says each word.

Runs in its own threads on onnxruntime; imports no torch. Knows no HTTP.
"""
