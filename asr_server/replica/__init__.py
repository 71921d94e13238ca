"""The process of a replica: `main.py` runs the engine, `ranks.py` starts the other ranks.

Speaks to the API process through `channel` alone. Knows no text: only tokens leave it.
"""
