"""The app of `tests/api`, which the tests of this folder use too."""

from tests.api.conftest import app, client

__all__ = ["app", "client"]
