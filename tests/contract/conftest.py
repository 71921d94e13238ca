from tests.support.api_fixtures import *  # noqa: F403
