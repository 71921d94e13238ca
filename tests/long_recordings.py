from tests.support.long_recordings import *  # noqa: F403  # until every test imports it from there
