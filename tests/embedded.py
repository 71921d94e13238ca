from tests.support.embedded import *  # noqa: F403  # until every test imports it from there
