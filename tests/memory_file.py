from tests.support.memory_file import *  # noqa: F403  # until every test imports it from there
