from collections.abc import Iterator

import pytest

from tests.conftest import Server, run_server


@pytest.fixture
def brisk_server() -> Iterator[Server]:
    with run_server("--log-level", "warning", "--wyoming-port", "0") as server:
        yield server
        assert server.get("/health").status_code == 200
        assert "Traceback" not in server.written()
