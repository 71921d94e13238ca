"""What the API process and a replica share: the messages between them, and the connections that carry these.

Used by `dispatch` on one side and by `replica` and `engine` on the other. Knows neither.
"""
