"""The app and the strict client of `tests/api`, which the tests of this folder use too."""

from tests.api.conftest import app, client

__all__ = ["app", "client"]
