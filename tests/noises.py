from tests.support.noises import *  # noqa: F403  # until every test imports it from there
