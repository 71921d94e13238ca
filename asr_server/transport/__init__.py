"""Carries commands and events between the API process and a replica. Used by the workers package."""
