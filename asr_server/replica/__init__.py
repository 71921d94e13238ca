"""The process of a replica: `main.py` begins it, `loop.py` runs the engine in it.

`dispatch` starts `main.py` by the name of its module (`dispatch/inline.py` calls `loop.py`, in a thread) and
speaks to it through `channel` alone. Knows no text: only tokens leave it.
"""
