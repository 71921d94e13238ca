from tests.support.real_weights import *  # noqa: F403  # until every test imports it from there
