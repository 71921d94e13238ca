import shutil
from pathlib import Path

import pytest

from asr_server.config import EMBEDDED_MODEL


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(EMBEDDED_MODEL, tmp_path / "model")
