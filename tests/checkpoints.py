from tests.support.checkpoints import *  # noqa: F403  # until every test imports it from there
