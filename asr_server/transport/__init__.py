"""Messages between the API process and a replica, and the connections that carry them.

Runs in both; knows neither. Imports no torch unless a tensor is sent.
"""
