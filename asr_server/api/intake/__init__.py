"""A request until its audio is here: its form, its upload, its place."""
