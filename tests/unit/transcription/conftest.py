from collections.abc import AsyncIterator

import pytest

from tests.unit.transcription.running_app import RunningApp


@pytest.fixture
async def app() -> AsyncIterator[RunningApp]:
    app = RunningApp()
    await app.dispatcher.start()
    yield app
    await app.dispatcher.stop()
    app.pool.shutdown()
