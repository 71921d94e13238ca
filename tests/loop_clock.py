from tests.support.clock import *  # noqa: F403  # until every test imports it from there
