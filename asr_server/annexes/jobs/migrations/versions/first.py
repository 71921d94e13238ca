"""The tables as `rows.py` had them at first: a new database is made from there, and is up to date."""

revision = "first"
down_revision = None


def upgrade() -> None:
    pass
