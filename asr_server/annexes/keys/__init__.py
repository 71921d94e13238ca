"""Keys of clients: who may ask, for which models, and how much."""
