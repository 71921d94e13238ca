"""The app of `tests/api`, which the tests of this folder use too."""

from tests.api.conftest import app

__all__ = ["app"]
