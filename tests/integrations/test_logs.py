"""Forwarding of the library's log to the logger of an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvoffload.integrations.logs import join


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def root() -> Iterator[_Kept]:
    """A handler of the root logger, as in an engine that calls `logging.basicConfig`."""
    library, kept = logging.getLogger("kvoffload"), _Kept()
    handlers, propagates = library.handlers, library.propagate
    library.handlers, library.propagate = [], True
    logging.getLogger().addHandler(kept)
    yield kept
    logging.getLogger().removeHandler(kept)
    library.handlers, library.propagate = handlers, propagates


def test_an_engine_that_logs_through_the_root_has_each_line_once(root: _Kept) -> None:
    join(logging.getLogger("engine_with_root.kvoffload"))
    logging.getLogger("kvoffload.tiers").warning("a block is %s", "damaged")
    assert root.lines == ["kvoffload: a block is damaged"]


def test_an_engine_with_its_own_handler_has_each_line_once(root: _Kept) -> None:
    engine, kept = logging.getLogger("engine_without_root"), _Kept()
    engine.propagate = False
    engine.addHandler(kept)
    join(logging.getLogger("engine_without_root.kvoffload"))
    logging.getLogger("kvoffload.tiers").warning("a block is %s", "damaged")
    assert kept.lines == ["kvoffload: a block is damaged"]
    assert root.lines == ["a block is damaged"], "the user's own handler"
