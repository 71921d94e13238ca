"""The app of `tests/unit/api`, which the tests of this folder use too."""

from tests.support.api_fixtures import app

__all__ = ["app"]
