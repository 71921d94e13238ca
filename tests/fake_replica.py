from tests.support.fake_replica import *  # noqa: F403  # until every test imports it from there
