from tests.support.speech import *  # noqa: F403  # until every test imports it from there
