"""What Alembic runs to migrate: `store.py` gives it the connection."""

from alembic import context


def migrate() -> None:
    context.configure(connection=context.config.attributes["connection"])
    with context.begin_transaction():
        context.run_migrations()


if __name__ == "env_py":  # as Alembic names it
    migrate()
