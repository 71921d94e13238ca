from tests.support.tokens import *  # noqa: F403  # until every test imports it from there
