"""The process of a replica: `main.py` starts it, `loop.py` runs the engine.

Speaks to the API process through `channel` alone. Knows no text: only tokens leave it.
"""
