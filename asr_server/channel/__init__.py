"""What the API process and a replica share: the messages between them, and the connections that carry these.

Runs in both. Used by `dispatch` and `api` on one side, by `replica` and `engine` on the other, and by
`metrics.py`. Knows neither side; imports no torch unless a tensor is sent.
"""
