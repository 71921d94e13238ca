"""The app and the strict client of `tests/unit/api`, which the tests of this folder use too."""

from tests.support.api_fixtures import app, client

__all__ = ["app", "client"]
