"""Replicas of the engine: how they are started, watched, replaced, and given work."""
