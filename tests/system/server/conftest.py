from tests.unit.server.conftest import *  # noqa: F403
