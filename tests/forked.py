from tests.support.forked import *  # noqa: F403  # until every test imports it from there
