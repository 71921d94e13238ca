"""uvicorn's protocols with bounds on what a client may cost."""
