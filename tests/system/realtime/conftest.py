from tests.unit.realtime.conftest import *  # noqa: F403
