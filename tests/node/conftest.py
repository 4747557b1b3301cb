"""A directory for pools."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.node.directory import SHARED_MEMORY


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvoffload-test-", dir=SHARED_MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fast_burials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dead members are buried by the next look, without a line in the log."""
    monkeypatch.setattr("kvoffload.node.manager.GRACE_S", 0.0)
    monkeypatch.setattr("kvoffload.node.manager.CHECK_S", 0.0)
    logging.getLogger("kvoffload.node").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("kvoffload.node").setLevel(logging.NOTSET)
