"""The messages between the API process and a replica, and the connections that carry them.

Runs in both. Used by `dispatch` and `api` on one side, by `replica` and `engine` on the other, and by
`metrics.py`. Knows neither side; imports no torch unless a tensor is sent.
"""
