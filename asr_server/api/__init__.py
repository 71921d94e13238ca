"""The HTTP API, in the API process. Imports no torch and never blocks the event loop."""
