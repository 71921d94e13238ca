from tests.support.raw_client import *  # noqa: F403  # until every test imports it from there
