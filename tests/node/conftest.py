"""A directory for pools."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.node.pool_directory import SHARED_MEMORY


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
    yield path
    shutil.rmtree(path)
