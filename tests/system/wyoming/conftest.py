from tests.unit.wyoming.conftest import *  # noqa: F403
