"""Alembic's scripts for the database of jobs."""
