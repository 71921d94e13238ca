"""The process of a replica: `main.py` begins it, `loop.py` runs the engine in it.

`dispatch` starts it by the name of its module, and speaks to it through `channel` alone.
"""
